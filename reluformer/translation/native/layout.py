"""Structures that the native library reads, as in `decoder/description.h`."""

import ctypes
from ctypes import POINTER, Structure, c_double, c_int32, c_int64, c_void_p


class Table(Structure):
    """`TableDescription`: rows of weights, with one scale per row for int8."""

    _fields_ = [
        ("rows", c_void_p),
        ("scales", c_void_p),
        ("height", c_int64),
        ("width", c_int64),
        ("kind", c_int64),
    ]


class Norm(Structure):
    """`NormDescription`: gain and bias; no gain means no norm, no bias means RMS norm."""

    _fields_ = [("gain", c_void_p), ("bias", c_void_p), ("epsilon", c_double)]


class Attention(Structure):
    """`AttentionDescription`: projections, norms of heads, and the weight function."""

    _fields_ = [
        ("query", c_int64),
        ("key_value", c_int64),
        ("out", c_int64),
        ("query_norm", Norm),
        ("key_norm", Norm),
        ("head_norm", Norm),
        ("offset", c_void_p),
        ("factor", c_void_p),
        ("scale", c_double),
        ("exponent", c_double),
        ("row_normalise", c_double),
        ("power", c_int64),
    ]


class Memory(Structure):
    """`MemoryDescription`."""

    _fields_ = [
        ("keys", c_int64),
        ("values", c_int64),
        ("norm", Norm),
        ("temperature", c_double),
        ("power", c_int64),
    ]


class Layer(Structure):
    """`LayerDescription`."""

    _fields_ = [
        ("self", Attention),
        ("cross", Attention),
        ("memory", Memory),
        ("self_norm", Norm),
        ("cross_norm", Norm),
        ("memory_norm", Norm),
    ]


class Model(Structure):
    """`ModelDescription`."""

    _fields_ = [
        ("source_embedding", c_int64),
        ("target_embedding", c_int64),
        ("output", c_int64),
        ("encoder", POINTER(Layer)),
        ("decoder", POINTER(Layer)),
        ("encoder_norm", Norm),
        ("decoder_norm", Norm),
        ("sinusoid_rates", c_void_p),
        ("rotary_rates", c_void_p),
        *((name, c_int64) for name in (
            "vocabulary", "width", "heads", "key_heads", "head_width", "slots",
            "encoder_layers", "decoder_layers", "is_pre_norm", "bos", "eos",
        )),
    ]  # fmt: skip


class Task(Structure):
    """`TaskDescription`."""

    _fields_ = [
        ("tokens", c_void_p),
        ("lengths", c_void_p),
        ("shortest", c_void_p),
        ("longest", c_void_p),
        ("banned", c_void_p),
        ("sentences", c_int64),
        ("beams", c_int64),
        ("banned_count", c_int64),
        ("best", c_int64),
        ("threads", c_int64),
        ("length_penalty", c_double),
    ]


class HypothesisRecord(Structure):
    """`HypothesisDescription`."""

    _fields_ = [
        ("tokens", POINTER(c_int32)),
        ("length", c_int64),
        ("log_probability", c_double),
        ("score", c_double),
        ("is_complete", c_int64),
    ]


class Counts(Structure):
    """`Counts`: rows of tables that were read, and rows without skipping."""

    _fields_ = [
        ("slots_read", c_int64),
        ("slots", c_int64),
        ("values_read", c_int64),
        ("values", c_int64),
    ]


class Row(Structure):
    """`Row` of `decoder/step.h`: one hypothesis in one step."""

    _fields_ = [("sentence", c_int64), ("token", c_int32), ("parent", c_int32)]


def declare(library: ctypes.CDLL) -> None:
    """Set argument and result types of the library's functions."""
    signatures = {
        "model_description_size": (c_int64,),
        "task_description_size": (c_int64,),
        "int8_instructions": (ctypes.c_char_p,),
        "tables_new": (c_void_p,),
        "tables_free": (None, c_void_p),
        "tables_pack": (c_int64, c_void_p, POINTER(Table), c_void_p, c_int64),
        "model_new": (c_void_p, POINTER(Model), c_void_p),
        "model_free": (None, c_void_p),
        "search_new": (c_void_p, c_void_p, POINTER(Task)),
        "search_free": (None, c_void_p),
        "search_run": (c_int64, c_void_p, c_int64),
        "search_ended": (c_int64, c_void_p, c_int64),
        "search_hypothesis": (None, c_void_p, c_int64, c_int64, POINTER(HypothesisRecord)),
        "search_counts": (None, c_void_p, POINTER(Counts)),
        "decoder_new": (c_void_p, c_void_p, POINTER(Task)),
        "decoder_free": (None, c_void_p),
        "seconds_to_read": (c_double, c_int64, c_int64, c_int64),
        "decoder_step": (c_int64, c_void_p, POINTER(Row), c_int64, c_void_p, c_void_p),
    }
    for name, (result, *arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    assert library.model_description_size() == ctypes.sizeof(Model)
    assert library.task_description_size() == ctypes.sizeof(Task)
