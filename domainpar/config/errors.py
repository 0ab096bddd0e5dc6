"""The error of a command that was asked for what cannot be done."""


class ConfigError(ValueError):
    """What was asked cannot be done, found before work began: commands print it once and end with exit code 2.

    Every rank raises it together, or none: rank 0 alone prints.

    Attributes:
        hint: What to do instead, one line.
    """

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.hint = hint
