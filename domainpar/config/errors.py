"""The error of a command that was asked for what cannot be done."""

from domainpar.problems import Problem


class ConfigError(Problem):
    """What was asked cannot be done, found before work began: commands print it once and end with exit code 2.

    Every rank raises it together, or none: rank 0 alone prints.
    """
