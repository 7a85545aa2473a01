"""The weights of drawn.py in place of SGLang's dummy weights: a plug-in of SGLang's, which it loads in all its
processes."""

from sglang.srt.model_loader import loader

from examples.whole_models.drawn import draw_all


def register() -> None:
    """Let SGLang's loader of dummy weights draw these; the plug-in's entry point."""
    loader.initialize_dummy_weights = draw_all
