"""How many tokens fit: from a Hugging Face config and a GPU's memory, with the cache's own arithmetic. Pure functions over values.

::

    shape = model_shape(read_config("config.json"))
    budget = Budget(gpu_bytes=80 * GIB, weight_bytes=weight_count(config).nbytes)
    capacity = capacity_of(get_backend("int4"), shape, budget, Workload(context=32768))
"""

from kvq_core.capacity.config import model_shape, read_config
from kvq_core.capacity.plan import GIB, Budget, CacheSize, Capacity, Workload, capacity_of, size_of
from kvq_core.capacity.shape import AttentionLayer, ModelShape
from kvq_core.capacity.weights import WeightCount, weight_count, weight_file_bytes

__all__ = [
    "GIB",
    "AttentionLayer",
    "Budget",
    "CacheSize",
    "Capacity",
    "ModelShape",
    "WeightCount",
    "Workload",
    "capacity_of",
    "model_shape",
    "read_config",
    "size_of",
    "weight_count",
    "weight_file_bytes",
]
