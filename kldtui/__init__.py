"""kldtui: review where a quantized language model departs from its reference."""

__version__ = "0.1.0"
