"""A config on another layout, checked."""

from mtjax.config import Config, on_layout, validate
from mtjax.config.mesh import Layout


def checked_layout(config: Config, layout: Layout) -> Config:
    """`config` on the mesh of `layout`.

    Raises:
        ValueError: the mesh doesn't divide what it splits; names the layout.
    """
    try:
        return validate(on_layout(config, layout))
    except ValueError as error:
        raise ValueError(f"--meshes {layout.text}: {error}") from error
