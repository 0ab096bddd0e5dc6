"""Read by every Python process that has this folder on its path: torch, once imported, finds pretended GPUs."""

import importlib.abc
import importlib.util
import os
import sys


class _Finder(importlib.abc.MetaPathFinder):
    """Lets something happen before and after torch is imported, and after `torch.distributed` is."""

    def find_spec(self, name, path=None, target=None):
        if name not in ("torch", "torch.distributed"):
            return None
        sys.meta_path.remove(self)  # for this search
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        load = spec.loader.exec_module

        def exec_module(module):
            import card

            if name == "torch":
                card.before_torch()
            load(module)
            if name == "torch":
                card.after_torch()
            elif os.environ.get(card.NCCL):
                import mocked_nccl

                mocked_nccl.install(module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("PRETENDED_GPUS"):
    sys.meta_path.insert(0, _Finder())
