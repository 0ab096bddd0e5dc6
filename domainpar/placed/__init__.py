"""Placed tensors: any torch program, unchanged, on one graph that is split over ranks.

A tensor of the whole graph of which this rank holds its rows (`tensor`), axes of such rows (`axes`), the ranks that
share them (`ranks`), rows that change hands (`moves`), one table of rules for ATen's calls (`dispatch`, `rules`), a
part of a graph (`part`, `split`, `sets`), and whole gradients (`parallelize`, `parameter_gradients`).

Parts of torch that are not public and that this room relies on, with what breaks where a release lacks them:

- `Tensor._make_wrapper_subclass`, `torch._C._disabled_torch_function_impl` (`tensor`): there are no placed tensors.
- `torch._decomp.decomposition_table`, `torch._C._dispatch_has_kernel_for_dispatch_key` (`dispatch`): calls without a
  rule of their own are refused by name.
- `torch._C._set_view_replay_enabled` (`part`): gradients of views that were written to are refused.
- `torch.utils._python_dispatch.return_and_correct_aliasing` (`dispatch`): calls that reshape in place, as `matmul` of a
  vector makes, fail.
- `Tensor._view_func_unsafe` (`dispatch`): views of gradients that hooks write to are refused.
- `_schema` of ATen's calls (`dispatch`), `Tensor._base`, `Tensor._version` (`input_log`, `dispatch`).
- `domainpar.nn.uncompiled`, for programs that are compiled around placed tensors.
"""
