"""Any torch module on a split graph: marks that say what rows are, a watch over torch calls, and a rule for each call.

Parts of torch that are not public and that this room relies on, with what breaks where a release lacks them:

- `torch.overrides._get_current_function_mode_stack` (`watch`): the watch of a thread is not found, so scripted,
  checkpointed and compiled functions run unseen, and `verify` sees no rows.
- `torch._C.DisableTorchFunction` (`rows`): our own communication would go through the rules.
- `Tensor._version` (`rows`, `versions`, `gradient_sums`): changes in place, and gradients that are summed twice, would
  not be noticed.
- `Tensor._base` (`rules/scatters`): values written into columns of rows might be written into a copy.
- `UntypedStorage._cdata`, `StorageWeakRef` (`versions`): tensors that share memory would not be recognised.
- `__dict__` of a tensor and of a storage (`rows`, `part`, `gradient_sums`): marks could not be attached to tensors.
- `torch.utils._python_dispatch.TorchDispatchMode` (`recomputation`): operations would not be seen.
- `torch._C._functorch.is_functorch_wrapped_tensor` (`versions`): tensors inside `vmap` would be asked for memory.
- `_forward_cls` of a `BackwardCFunction` (`watch`): our own functions might be taken for a user's, and refused.
- `_qualified_op_name` of `torch.ops` (`calls`): an extension's operation would have the name of one of torch's.
- `Module._parameters`, `_buffers`, `_backward_hooks`, `_backward_pre_hooks`, and `_backward_hooks`,
  `_post_accumulate_grad_hooks` of a parameter (`modules`): hooks on gradients would not be refused.
- `torch.jit._state._try_get_jit_cached_function`, `_torchdynamo_inline`; `CheckpointFunction` and
  `_checkpoint_without_reentrant_generator`; `torch._dynamo.eval_frame._callback_from_stance` (`transforms`): an
  AttributeError where the first watch begins, or where a scripted or compiled function is called.
- `_torchdynamo_disable`, `torch._C._dynamo.eval_frame` (`domainpar.nn.uncompiled`): an ImportError, or errors of the
  compiler where a program around a parallel model is compiled.
"""
