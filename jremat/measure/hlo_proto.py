"""The part of XLA's HloProto that is read here: messages, fields and their numbers, as protobuf's library needs them.

XLA dumps the scheduled program and its buffer assignment as protobuf, and no package ships the schema. Source:
xla/service/hlo.proto and xla/xla_data.proto, whose numbers are unchanged since 2018, those of stack frames since 2023.
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

# Per field: name, number, type where it is no integer (enums are read as integers), * where it is repeated.
_SCHEMA = {
    "HloProto": "hlo_module=1:HloModuleProto buffer_assignment=3:BufferAssignmentProto",
    "HloModuleProto": "entry_computation_id=6 computations=3:HloComputationProto* stack_frame_index=17:StackFrameIndex",
    "HloComputationProto": "instructions=2:HloInstructionProto* id=5 root_id=6",
    "HloInstructionProto": "name=1:string opcode=2:string shape=3:ShapeProto metadata=7:OpMetadata parameter_number=9 "
    "tuple_index=13 id=35 operand_ids=36* called_computation_ids=38*",
    "OpMetadata": "op_name=2:string source_file=3:string source_line=4 stack_frame_id=15",
    "ShapeProto": "element_type=2 dimensions=3* tuple_shapes=4:ShapeProto*",
    "StackFrameIndex": "file_names=1:string* function_names=2:string* file_locations=3:FileLocation* "
    "stack_frames=4:StackFrame*",
    "FileLocation": "file_name_id=1 function_name_id=2 line=3",
    "StackFrame": "file_location_id=1 parent_frame_id=2",
    "BufferAssignmentProto": "logical_buffers=1:LogicalBufferProto* buffer_allocations=3:BufferAllocationProto* "
    "heap_simulator_traces=4:HeapSimulatorTrace*",
    "LogicalBufferProto": "id=1 size=2 defined_at=3:Location color=4",
    "Location": "shape_index=3* instruction_id=4",
    "BufferAllocationProto": "is_entry_computation_parameter=5 maybe_live_out=7 assigned=9:Assigned*",
    "Assigned": "logical_buffer_id=1",
    "HeapSimulatorTrace": "events=1:Event*",
    "Event": "kind=1 buffer_id=2 share_with_canonical_id=5",
}
FREE, SHARE = 1, 2
"""An Event's kind; 0 is an allocation."""

PRIMITIVE_TYPES = {1: "bool", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "uint8", 7: "uint16", 8: "uint32",
    9: "uint64", 10: "float16", 11: "float32", 12: "float64", 13: "tuple", 15: "complex64", 16: "bfloat16", 17: "token",
    18: "complex128", 19: "float8_e5m2", 20: "float8_e4m3fn", 21: "int4", 22: "uint4"}  # fmt: skip
"""A ShapeProto's element_type, by the names that NumPy gives them where it has one."""


def hlo_proto(data: bytes) -> Any:
    """The message that XLA dumped.

    Raises:
        ValueError: the bytes are none.
    """
    message = _CLASS()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise ValueError(f"data: expected an HloProto of XLA, got {len(data)} bytes that are none") from error
    return message


def message_class(name: str, schema: Mapping[str, str], root: str) -> Any:
    """The class of protobuf's library for a schema.

    Args:
        name: of the schema.
        schema: a line of fields for each message, as ``_SCHEMA`` has them.
        root: the message whose class it is.
    """
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name=f"jremat/{name}.proto", package=f"jremat.{name}", syntax="proto3")
    for message, fields in schema.items():
        described = file.message_type.add(name=message)
        for field in fields.split():
            own, _, rest = field.partition("=")
            number, _, kind = rest.removesuffix("*").partition(":")
            label = kinds.LABEL_REPEATED if field.endswith("*") else kinds.LABEL_OPTIONAL
            made = described.field.add(name=own, number=int(number), label=label, type=kinds.TYPE_INT64)
            if kind == "string":
                made.type = kinds.TYPE_STRING
            elif kind:
                made.type, made.type_name = kinds.TYPE_MESSAGE, f".jremat.{name}.{kind}"
    pool = descriptor_pool.DescriptorPool()  # of its own: another library in the process may know all of HloProto
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"jremat.{name}.{root}"))


_CLASS = message_class("hlo", _SCHEMA, "HloProto")
