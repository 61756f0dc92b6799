"""A kvq mode from outside kvq: ``int3_per_token_head``. Its class is :class:`kvq_int3.backend.Int3PerTokenHead`."""
