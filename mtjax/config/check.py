"""The one way a config class refuses a value."""


def require(ok: bool, name: str, got: object, expected: str, fix: str) -> None:
    """Raise ValueError naming the field, what was got, what was expected and the fix."""
    if not ok:
        raise ValueError(f"{name}: got {got!r}, expected {expected}; {fix}")


class RunError(RuntimeError):
    """What goes wrong in a run through no error of the program: one message, no traceback."""
