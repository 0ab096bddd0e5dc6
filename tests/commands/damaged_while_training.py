"""`domainpar.train` whose events are damaged on disk after it began; `test_bad_input.py` starts it under mpiexec."""

import sys
from pathlib import Path

from domainpar import train
from domainpar.tracking.training import loop, parts

SPOIL_BEFORE_STEP = 3


def _spoil(store: Path) -> None:
    """Overwrite the chunks of every event: sizes stay, so that only reading shows it."""
    for path in store.glob("event*.zarr.zip"):
        content = bytearray(path.read_bytes())
        content[len(content) // 10 : -len(content) // 3] = bytes(len(content[len(content) // 10 : -len(content) // 3]))
        path.write_bytes(content)


def main(argv: list[str]) -> int:
    plain_step, plain_loader = loop.Trainer.step, parts.PartLoader.__init__

    def step(self, samples, step, following=()):
        if step == SPOIL_BEFORE_STEP:
            if self.world.is_root:
                _spoil(Path(argv[argv.index("--store") + 1]))
            self.world.transport.barrier()
        return plain_step(self, samples, step, following)

    loop.Trainer.step = step
    parts.PartLoader.__init__ = lambda *args, **kwargs: plain_loader(*args, **kwargs, keep_edges=0)
    return train.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
