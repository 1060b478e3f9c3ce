"""Matrices that stay quantized in memory; the step that uses one turns it into float32."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["BLOCK", "Matrix", "Quantized", "rows_of", "weight"]

BLOCK = 32
"""How many values of a row share a scale."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix (out, in) of 4 or 8 bits a value: ``quants * scales + mins``, or ``(quants - offset) * scales``.

    Attributes:
        quants: uint8 (out, in / 32, 16), two values a byte: of each 32 the first 16 in the low halves, the others in
            the high ones; or int8 (out, in / 32, 32).
        scales: float16 (out, in / 32).
        mins: float16 (out, in / 32), or None.
        offset: static; taken from every quant.
    """

    quants: jax.Array | np.ndarray
    scales: jax.Array | np.ndarray
    mins: jax.Array | np.ndarray | None = None
    offset: int = field(default=0, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in), as for the plain matrix."""
        return self.scales.shape[0], self.scales.shape[1] * BLOCK

    @classmethod
    def unpack(cls, kind: str, data: np.ndarray) -> Quantized:
        """From the bytes of a file.

        Args:
            kind: ``"Q4_0"``, ``"Q4_1"`` or ``"Q8_0"``.
            data: uint8 (out, bytes of a row).

        Raises:
            ValueError: another kind.
        """
        n_head = {"Q4_0": 2, "Q4_1": 4, "Q8_0": 2}.get(kind)
        if n_head is None:
            raise ValueError(f"matrices of type {kind} cannot stay quantized; only Q4_0, Q4_1 and Q8_0 can")
        blocks = data.reshape(data.shape[0], -1, n_head + (BLOCK if kind == "Q8_0" else BLOCK // 2))
        head = np.ascontiguousarray(blocks[..., :n_head]).view("<f2").astype(np.float16, copy=False)
        quants = np.ascontiguousarray(blocks[..., n_head:])
        scales = np.ascontiguousarray(head[..., 0])
        if kind == "Q8_0":
            return cls(quants.view(np.int8), scales)
        if kind == "Q4_0":
            return cls(quants, scales, offset=8)
        return cls(quants, scales, np.ascontiguousarray(head[..., 1]))

    def dequantize(self) -> jax.Array:
        """The plain matrix, float32 (out, in)."""
        quants = jnp.asarray(self.quants)
        if quants.dtype == jnp.uint8:
            quants = jnp.concatenate([quants & 15, quants >> 4], axis=-1)
        values = (quants.astype(jnp.float32) - self.offset) * jnp.asarray(self.scales, jnp.float32)[..., None]
        if self.mins is not None:
            values = values + jnp.asarray(self.mins, jnp.float32)[..., None]
        return values.reshape(*self.scales.shape[:-1], -1)


Matrix = jax.Array | np.ndarray | Quantized


def weight(matrix: Matrix, after: jax.Array | None = None) -> jax.Array | np.ndarray:
    """The matrix as a plain array, (out, in).

    Args:
        matrix: plain or quantized.
        after: a value that has to be there first: what the matrix is multiplied with. Without it XLA may well
            dequantize all matrices of a step at once, and hold several times the memory that quantizing spares.
    """
    if not isinstance(matrix, Quantized):
        return matrix
    if after is not None:
        # A real dependency, as barriers are gone by the time XLA assigns memory.
        nothing = (after.reshape(-1)[0] * 0).astype(jnp.float16)
        matrix = replace(matrix, scales=matrix.scales + nothing)
    return matrix.dequantize()


def rows_of(matrix: Matrix, index: jax.Array) -> jax.Array:
    """Some rows as a plain array, (n, in): of a quantized matrix no others are turned into float32.

    Args:
        matrix: (out, in).
        index: int32 (n,); what is out of range reads the nearest row.
    """

    def take(array: jax.Array | np.ndarray) -> jax.Array:
        return jnp.asarray(array).at[index].get(mode="clip")

    return weight(jax.tree.map(take, matrix))
