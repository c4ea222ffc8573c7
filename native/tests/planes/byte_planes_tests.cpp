// Elements are cut into the planes that the format says and put together again, and those of other sizes are refused.

#include <array>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

#include "harness.hpp"
#include "planes/byte_planes.hpp"

namespace dsh::test {
namespace {

using Words = std::array<std::uint32_t, 2>;
using Planes = std::array<std::uint8_t, 8>;

constexpr Words words = {0x80112233, 0x00000001};
constexpr Words base = {0x80112230, 0x00000002};

template <typename Run> bool is_refused(Run run) {
    try {
        run();
    } catch (const std::invalid_argument &) {
        return true;
    }
    return false;
}

// Check that these are the planes of `words`, one after the other, and that they give the words again.
void check_planes(Transform transform, const Planes &expected) {
    const auto data = std::as_bytes(std::span(words));
    const auto other = std::as_bytes(std::span(base));
    Planes planes;
    split_planes(data.data(), other.data(), words.size(), 4, transform,
                 std::as_writable_bytes(std::span(planes)).data());
    CHECK(planes == expected);
    std::vector<Plane> given;
    for (std::size_t i = 0; i < 4; ++i) {
        given.push_back({planes.data() + i * words.size(), false});
    }
    Words again;
    join_planes(given, other.data(), words.size(), transform, std::as_writable_bytes(std::span(again)).data());
    CHECK(again == words);
}

} // namespace

TEST(planes_are_the_bytes_of_the_transformed_elements_the_least_significant_first) {
    check_planes(Transform::plain, {0x33, 1, 0x22, 0, 0x11, 0, 0x80, 0});
    check_planes(Transform::rotated, {0x67, 2, 0x44, 0, 0x22, 0, 0x00, 0});
    check_planes(Transform::exclusive, {3, 3});
    check_planes(Transform::rotated_xor, {6, 6});
    check_planes(Transform::difference, {6, 1});
}

TEST(elements_of_other_sizes_are_refused) {
    const std::vector<std::byte> bytes(48);
    std::vector<std::byte> planes(48);
    for (const std::size_t itemsize : {0, 3, 5, 16}) {
        CHECK(is_refused([&] { require_itemsize(itemsize); }));
        CHECK(is_refused([&] { split_planes(bytes.data(), nullptr, 1, itemsize, Transform::plain, planes.data()); }));
        const std::vector<Plane> given(itemsize, Plane{bytes.data(), false});
        CHECK(is_refused([&] { join_planes(given, nullptr, 1, Transform::plain, planes.data()); }));
    }
    for (const std::size_t itemsize : {1, 2, 4, 8}) {
        require_itemsize(itemsize);
    }
}

TEST(all_bytes_are_the_same_or_one_is_not) {
    for (const std::size_t count : {1, 2, 7, 8, 9, 1000}) {
        std::vector<std::byte> bytes(count, std::byte{3});
        CHECK(is_constant(bytes));
        for (std::size_t i = 0; count > 1 && i < count; i += 1 + count / 7) {
            bytes[i] = std::byte{4};
            CHECK(!is_constant(bytes));
            bytes[i] = std::byte{3};
        }
    }
    CHECK(is_constant({}));
}

} // namespace dsh::test
