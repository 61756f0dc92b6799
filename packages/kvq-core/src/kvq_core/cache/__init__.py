"""A paged cache for callers without a block manager of their own: :class:`~.paged.PagedKVCache`, its layouts, sequences and files."""
