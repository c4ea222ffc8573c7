"""The kinds of tensors that a checkpoint has by itself: no State Provider may take one of these names.

The tensors in a provider's objects are looked at as a kind with the object's name, beside the kinds that are listed.
"""

from catalog.format.manifest import NOT_STATE

__all__ = ["OWN_KINDS", "STATE_OF_OPTIMIZERS"]

OWN_KINDS = NOT_STATE | {"model", "buffer", "master"}
"""The kinds that no optimizer's state may have either."""

STATE_OF_OPTIMIZERS = frozenset(
    {
        *("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "exp_inf", "square_avg", "acc_delta"),
        *("grad_avg", "sum", "mu_product", "eta", "mu", "ax", "prev", "step_size", "row_var", "col_var", "variance"),
    }
)
"""The state of torch's optimizers. They make it in their first step: before that nothing shows what it will be called.
"""
