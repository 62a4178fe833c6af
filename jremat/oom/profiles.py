"""What profilers write: ``jax.profiler.save_device_memory_profile``, and the JSON of XProf's memory viewer.

Sources: google/pprof's proto/profile.proto, and xprof's plugin/xprof/protobuf/memory_viewer_preprocess.proto.
"""

import json
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from jremat.measure.buffers import Buffer
from jremat.measure.hlo_proto import message_class
from jremat.oom.dump import Dump, array_of

_PPROF = {
    "Profile": "sample_type=1:ValueType* sample=2:Sample* location=4:Location* function=5:Function* "
    "string_table=6:string*",
    "ValueType": "type=1 unit=2",
    "Sample": "location_id=1* value=2* label=3:Label*",
    "Label": "key=1 str=2 num=3",
    "Location": "id=1 line=4:Line*",
    "Line": "function_id=1 line=2",
    "Function": "id=1 name=2 filename=4",
}
_Profile = message_class("pprof", _PPROF, "Profile")


def read_device_profile(data: bytes) -> Dump:
    """Arrays that were alive on the devices, by the Python line that made them.

    Args:
        data: of the file, gzip undone.

    Raises:
        ValueError: it is no profile of memory.
    """
    profile = _Profile()
    try:
        profile.ParseFromString(data)
    except DecodeError as error:
        raise ValueError("dump: expected a device memory profile, got a gzipped file that is none") from error
    text = dict(enumerate(profile.string_table))
    kinds = [text.get(kind.type, "") for kind in profile.sample_type]
    if "space" not in kinds:
        raise ValueError("dump: expected a device memory profile, got a profile of something else")
    functions = {function.id: function for function in profile.function}
    places = {location.id: location for location in profile.location}
    buffers = []
    for sample in profile.sample:
        nbytes = sample.value[kinds.index("space")] if len(sample.value) == len(kinds) else 0
        labels = {text.get(label.key): text.get(label.str, "") for label in sample.label}
        lines = [line for place in sample.location_id if place in places for line in places[place].line]
        users = [
            (Path(text.get(functions[line.function_id].filename, "")).name, line.line, line.function_id)
            for line in lines
            if line.function_id in functions
            and "site-packages" not in text.get(functions[line.function_id].filename, "")
        ]
        source = f"{users[0][0]}:{users[0][1]} ({text.get(functions[users[0][2]].name, '')})" if users else ""
        kind = "code" if labels.get("kind") == "executable" else "arrays"
        if nbytes > 0:
            buffers.append(Buffer(nbytes, kind, "", (), "", source, None, labels.get("kind", "buffer")))
    return Dump("a device memory profile of JAX", tuple(sorted(buffers, key=lambda buffer: -buffer.nbytes)))


def read_memory_viewer(text: str) -> Dump:
    """The heap at its peak.

    Raises:
        ValueError: no JSON, or not the memory viewer's.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"dump: expected the JSON of XProf's memory viewer, got JSON that breaks off: {error}"
        ) from error
    heap = _get(data, "maxHeap", "max_heap")
    if not isinstance(heap, list):
        raise ValueError("dump: expected the JSON of XProf's memory viewer with its maxHeap, got other JSON")
    buffers = [_heap_object(item) for item in heap if isinstance(item, dict)]
    mib = lambda *names: _mib(_get(data, *names))
    return Dump(
        "XProf's memory viewer",
        tuple(sorted(buffers, key=lambda buffer: -buffer.nbytes)),
        argument_bytes=mib("entryComputationParametersMib", "entry_computation_parameters_mib"),
        output_bytes=mib("maybeLiveOutMib", "maybe_live_out_mib"),
        temp_bytes=mib("peakHeapMib", "peak_heap_mib"),
    )


def _get(item: Any, *names: str) -> Any:
    return next((item[name] for name in names if name in item), None) if isinstance(item, dict) else None


def _mib(value: Any) -> int | None:
    return int(value * 2**20) if isinstance(value, int | float) and 0 <= value < 2**40 else None


def _heap_object(item: dict[str, Any]) -> Buffer:
    words = {name: value for name, value in item.items() if isinstance(value, str)}
    word = lambda *names: next((words[name] for name in names if name in words), "")
    dtype, shape = array_of(word("shapeString", "shape_string"))
    group = word("groupName", "group_name").lower()
    kind = "argument" if "param" in group else "output" if "output" in group else "temp"
    source = _get(item, "sourceInfo", "source_info")
    file, line = _get(source, "fileName", "file_name"), _get(source, "lineNumber", "line_number")
    return Buffer(
        nbytes=_mib(_get(item, "logicalBufferSizeMib", "logical_buffer_size_mib")) or 0,
        kind=kind,
        dtype=dtype,
        shape=shape,
        what=word("tfOpName", "tf_op_name"),
        source=f"{Path(str(file)).name}:{line}" if file and line else "",
        tag=None,
        instruction=word("instructionName", "instruction_name"),
    )
