"""The same for Hopper, in Gluon: :mod:`kvq_core.kernels.api` says what these names are for; they are provisional.

Apart, so that only kernels that a Hopper GPU launches import Gluon.
"""

from kvq_core.kernels.sm90.decode_multirow.kernel import attend_multirow
from kvq_core.kernels.sm90.decode_multirow.operands import Numbers
from kvq_core.kernels.sm90.prefill import as_stored, attend_in_groups
from kvq_core.kernels.sm90.store_mma import write_rows

__all__ = ["Numbers", "as_stored", "attend_in_groups", "attend_multirow", "write_rows"]
