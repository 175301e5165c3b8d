"""Models in the memory of the native library."""

import ctypes
import threading
import weakref
from dataclasses import dataclass
from typing import Any

from reluformer.errors import UserError
from reluformer.model import ModelConfig, ReLUFormer
from reluformer.model.pretrained import StoredModel
from reluformer.translation.native.describe import Describer, Lookup
from reluformer.translation.native.support import load, why_not
from reluformer.translation.native.tables import PackedTables, Precision


@dataclass
class SkippedRows:
    """Rows of tables that were read, and rows that would have been read without skipping."""

    slots_read: int = 0
    slots: int = 0
    values_read: int = 0
    values: int = 0


class NativeModel:
    """A model whose weights are packed for the native library.

    Args:
        skeleton: The model; it may be on the meta device.
        lookup: Values of its parameters by name.
        precision: Precision of tables of weights: `float32`, `bfloat16` or `int8`.

    Raises:
        UserError: The native library cannot run this model, or is not built.
    """

    def __init__(self, skeleton: ReLUFormer, lookup: Lookup, precision: Precision) -> None:
        reason = why_not(skeleton.config)
        if reason is not None:
            raise UserError(f"decoder is 'native', but the native library cannot be used: {reason}")
        self.config: ModelConfig = skeleton.config
        self.precision = precision
        self.skipped = SkippedRows()
        """Sums over all searches so far."""
        self.lock = threading.Lock()
        kernels = load()
        assert kernels is not None
        self.library: Any = kernels.library
        tables = PackedTables(self.library, precision)
        describer = Describer(skeleton, lookup, tables)
        described = describer.describe()
        self.handle: int = self.library.model_new(ctypes.byref(described), tables.hand_over())
        if not self.handle:
            raise MemoryError("not enough memory for the model")
        weakref.finalize(self, self.library.model_free, self.handle)

    @classmethod
    def of(cls, model: ReLUFormer, precision: Precision = "float32") -> "NativeModel":
        """A copy of a model's weights in the given precision."""
        parameters = model.state_dict()
        return cls(model, parameters.__getitem__, precision)

    @classmethod
    def read(cls, stored: StoredModel[ReLUFormer], precision: Precision) -> "NativeModel":
        """The model of parameters on the disk, which are packed one by one as they are read."""
        return cls(stored.skeleton, stored.lookup(), precision)
