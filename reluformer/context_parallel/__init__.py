"""Context parallelism: attention over a sequence that is sharded across ranks.

See `docs/context-parallel.md`.
"""

from reluformer.context_parallel.sharded_attention import attention
from reluformer.context_parallel.sharded_cache import ShardedCache
from reluformer.context_parallel.sharding import ShardedSequence

__all__ = ["ShardedCache", "ShardedSequence", "attention"]
