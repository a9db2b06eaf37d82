"""Multi-token prediction: how many tokens beyond the next one are trained on."""

from mtjax.config.check import config_class, require, require_defaults


@config_class("model.mtp")
class MtpConfig:
    """Modules behind the model, each of which predicts one more token ahead (DeepSeek-V3, arXiv
    2412.19437, section 2.2). They serve training alone: evaluation and generation leave them out.

    With `depth` 0 there are none, and `coefficient` keeps its default.
    """

    depth: int = 0
    """Modules, one behind the other; number k predicts the token k + 1 places ahead."""
    coefficient: float = 0.3
    """Weight of the mean of the modules' cross entropies in the loss, above 0 (DeepSeek-V3: 0.3,
    then 0.1)."""

    def __post_init__(self) -> None:
        require(self.depth >= 0, "model.mtp.depth", self.depth, "at least 0", "0 is none")
        if self.depth == 0:
            require_defaults(self, "model.mtp", ["coefficient"], "model.mtp.depth is 0")
        value = self.coefficient
        require(value > 0, "model.mtp.coefficient", value, "above 0", "set depth to 0 for none")
