"""Causal grouped-query attention in runs of queries, where all scores at once would be too many.

Softmax attention forms a score for each query and key. A run of queries sees the keys up to its own
end alone, so runs halve the products as well; a run's scores are computed again for the gradient
and never exist beside those of another run.
"""

from __future__ import annotations

from typing import Any

import vkjit.numpy as jnp
from vkjit import checkpoint, checkpoint_name, checkpoint_policies, nn

WHOLE_SCORES = 64 << 20
"""Bytes of float32 scores up to which queries are not divided."""
RUN = 512
"""Queries of a run: a product of this many rows still fills matrix units."""
_ATTENDED = "attention in runs"

KEEP_ATTENDED = checkpoint_policies.save_only_these_names(_ATTENDED)
"""Policy of a checkpoint around attention: results of attention in runs are kept.

A run forms its scores again for its own gradient; without the policy they would be formed a third
time for the result alone, which takes no more memory than the input of a block.
"""


def causal_attention(query: Any, key: Any, value: Any, segments: Any) -> Any:
    """Attention of each token to itself and what precedes it in its document.

    Args:
        query: [B,T,N,D].
        key: [B,T,K,D]; N is a multiple of K.
        value: As ``key``.
        segments: int32 [B,T], the document of each token. None: one document.

    Returns:
        [B,T,N,D] in the dtype of ``query``.
    """
    batch, length, heads = query.shape[:3]
    if 4 * batch * heads * length**2 <= WHOLE_SCORES or length <= RUN:
        mask = _same_document(segments, segments)
        return nn.dot_product_attention(query, key, value, mask=mask, is_causal=True)
    runs: list[Any] = []
    for start in range(0, length, RUN):
        end = min(start + RUN, length)
        given = (query[:, start:end], key[:, :end], value[:, :end])
        seen = None if segments is None else segments[:, :end]
        run = checkpoint(_run_of_queries, static_argnums=4)
        runs.append(run(*given, seen, start))
    return checkpoint_name(jnp.concatenate(runs, axis=1), _ATTENDED)


def _run_of_queries(query: Any, key: Any, value: Any, segments: Any, start: int) -> Any:
    """Attention of the queries from ``start`` to the end of ``key``."""
    places = jnp.arange(key.shape[1])
    mask = (places[start:, None] >= places[None, :])[None, None]
    if segments is not None:
        mask = jnp.logical_and(mask, _same_document(segments[:, start:], segments))
    return nn.dot_product_attention(query, key, value, mask=mask)


def _same_document(queries: Any, keys: Any) -> Any:
    """Bool [B,1,T,S], True where a query and a key stand in the same document."""
    if queries is None:
        return None
    return (queries[:, :, None] == keys[:, None, :])[:, None]
