"""Quantized, paged KV caches for Hugging Face transformers.

::

    from kvq_transformers import KVQCache, enable

    model.generate(**inputs, cache=KVQCache(model, mode="int4"))  # before transformers 5.24: past_key_values
    enable(model, mode="int4").generate(**inputs)  # the same, for every generate from now on

Importing this package registers the attention implementation ``kvq`` with transformers; the modes come from kvq's other packages.
"""

from kvq_transformers.attention import register
from kvq_transformers.cache import KVQCache
from kvq_transformers.calibration import Calibration, calibrate
from kvq_transformers.forward import CacheStateError
from kvq_transformers.switch import disable, enable
from kvq_transformers.value_balance import balance_values

register()

__version__ = "0.1.0"

__all__ = ["CacheStateError", "Calibration", "KVQCache", "balance_values", "calibrate", "disable", "enable"]
