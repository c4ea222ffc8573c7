"""Contrast of text by WCAG, from its computed colour and the colour that is really behind it."""

from typing import Any

from playwright.sync_api import Page

READABLE = 4.5
"""The minimum of WCAG 2 AA for text of normal size."""
DISCERNIBLE = 3.0
"""The minimum of WCAG 2 AA for parts of a graphic.

A single ink colour for figures on light and on dark pages can have a contrast of at most 4.35.
"""

_CONTRASTS = """selector => {
    const channels = text => {
        const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
        return [r, g, b, a];
    };
    const over = ([r, g, b, a], below) => [r, g, b].map((value, i) => a * value + (1 - a) * below[i]);
    const behind = element => {
        if (element === null) return [255, 255, 255];
        // A figure's paper is painted by the first of the drawings that lie on each other.
        const painted = element.matches('.svg-container') ? element.querySelector('.main-svg') : element;
        const colour = channels(getComputedStyle(painted).backgroundColor);
        return colour[3] === 1 ? colour.slice(0, 3) : over(colour, behind(element.parentElement));
    };
    const luminance = colour => {
        const [r, g, b] = colour.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    return [...document.querySelectorAll(selector)].filter(element => element.textContent.trim()).map(element => {
        const style = getComputedStyle(element), background = behind(element);
        const text = over(channels(element instanceof SVGElement ? style.fill : style.color), background);
        const [dark, light] = [luminance(text), luminance(background)].sort((a, b) => a - b);
        return {text: element.textContent, contrast: (light + 0.05) / (dark + 0.05), background};
    });
}"""


def contrasts(page: Page, selector: str) -> list[dict[str, Any]]:
    """Return `text`, `contrast` (1 to 21) and `background` (RGB, 0 to 255) of each element of `selector` with text."""
    return list(page.evaluate(_CONTRASTS, selector))
