"""Reports in the forms that users post, with causes as their threads found them; rebuilt, with figures of our own."""

_STATS = """RESOURCE_EXHAUSTED: Out of memory while trying to allocate {asked} bytes.
BufferAssignment OOM Debugging.
BufferAssignment stats:
             parameter allocation:  {arguments}
              constant allocation:   512.0KiB
        maybe_live_out allocation:  {results}
     preallocated temp allocation:  {temp}
  preallocated temp fragmentation:    34.0KiB (0.00%)
                 total allocation:   28.40GiB
              total fragmentation:   615.5KiB (0.00%)
Peak buffers:
"""


def _gpu(asked, arguments, results, temp, *buffers):
    rows = [
        f"\tBuffer {number}:\n\t\tSize: {size}\n{fields}\t\t==========================\n\n"
        for number, (size, fields) in enumerate(buffers, 1)
    ]
    return _STATS.format(asked=asked, arguments=arguments, results=results, temp=temp) + "".join(rows)


def _operator(name, file, line, shape):
    return (
        f'\t\tOperator: op_name="{name}" source_file="/home/me/{file}" source_line={line}\n'
        f"\t\tXLA Label: fusion\n\t\tShape: {shape}\n"
    )


def _argument(shape):
    return f"\t\tEntry Parameter Subshape: {shape}\n"


_STEP = "pjit(train_step)/jit(main)"
GPU_LOGITS = _gpu(
    29995136128,
    "475.37MiB",
    "474.37MiB",
    "27.93GiB",
    ("1.96GiB", _operator(f"{_STEP}/mul", "losses.py", 139, "f32[128,128,32128]")),
    ("1.96GiB", _operator(f"{_STEP}/jvp(Model)/decode/logits/dot_general", "layers.py", 52, "f32[128,128,32128]")),
    ("96.00MiB", _operator(f"{_STEP}/jvp(Model)/mlp/dot_general", "layers.py", 52, "bf16[128,256,1536]")),
    ("94.12MiB", _argument("f32[32128,768]")),
)
GPU_SMALL = _gpu(
    6291456,
    "6.00MiB",
    "6.00MiB",
    "0B",
    ("6.00MiB", _operator("jit(concatenate)/jit(main)/concatenate", "models.py", 689, "f32[4096,128,3]")),
    ("384.0KiB", _argument("f32[256,128,3]")),
)
_GPU_SCORES = _gpu(
    17179869184,
    "1.20GiB",
    "1.20GiB",
    "16.00GiB",
    ("4.00GiB", _operator(f"{_STEP}/jvp(Encoder)/attention/softmax/exp", "attention.py", 40, "f32[16,16,2048,2048]")),
    (
        "4.00GiB",
        _operator(f"{_STEP}/transpose(jvp(Encoder))/attention/mul", "attention.py", 41, "f32[16,16,2048,2048]"),
    ),
)
_GPU_RESIDUALS = _gpu(
    42949672960,
    "2.00GiB",
    "12.0KiB",
    "40.00GiB",
    ("6.00GiB", _operator(f"{_STEP}/jvp()/while/body/mlp/dot_general", "block.py", 31, "bf16[24,16,1024,8192]")),
    ("6.00GiB", _operator(f"{_STEP}/jvp()/while/body/mlp/mul", "block.py", 32, "bf16[24,16,1024,8192]")),
    ("1.50GiB", _operator(f"{_STEP}/jvp()/while/body/add", "block.py", 40, "bf16[24,16,1024,2048]")),
)
_GPU_TWICE = _gpu(
    4770354232,
    "9.60GiB",
    "9.60GiB",
    "1.10GiB",
    ("512.00MiB", _operator(f"{_STEP}/transpose(jvp())/dot_general", "block.py", 31, "f32[32000,4096]")),
)
_GPU_FLOAT32 = _gpu(
    21474836480,
    "3.00GiB",
    "1.0KiB",
    "20.00GiB",
    ("8.00GiB", _operator(f"{_STEP}/jvp()/while/body/norm/convert_element_type", "norm.py", 9, "f32[32,8,2048,4096]")),
    ("4.00GiB", _operator(f"{_STEP}/jvp()/while/body/attend/dot_general", "block.py", 20, "bf16[32,8,2048,4096]")),
)
_GPU_GATHERED = _gpu(
    38654705664,
    "1.00GiB",
    "1.0KiB",
    "36.00GiB",
    (
        "12.00GiB",
        '\t\tOperator: op_name="jit(step)/jvp()/all_gather" source_file="/a/fsdp.py" source_line=8\n'
        "\t\tXLA Label: all-gather.3\n\t\tShape: bf16[32,8192,24576]\n",
    ),
)
_GPU_STATE = _gpu(
    1073741824,
    "70.00GiB",
    "1.0KiB",
    "6.00GiB",
    ("8.00GiB", _argument("f32[80,8192,3276]")),
)

_TPU = """XlaRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in \
memory space hbm. Used 63.80G of 30.75G hbm. Exceeded hbm capacity by 33.05G.

Total hbm usage >= 65.05G:
    reserved          1.25G
    program          63.80G
    arguments            0B

Output size 0B; shares 0B with arguments.

Program hbm requirement 63.80G:
    global            1.14M
    scoped            4.56M
    HLO temp         63.79G (100.0% utilization: Unpadded (63.58G) Padded (63.58G), 0.3% fragmentation (210.89M))

  Largest program allocations in hbm:

"""
_TPU_ROW = """  {number}. Size: {size}
     Operator: op_name="{name}" source_file="/home/me/model.py" source_line={number}
     Shape: {shape}
     Unpadded size: 1.00G
{padding}     XLA label: fusion.{number} = fusion(custom-call.2), kind=kOutput, calls=fused_computation.9
     Allocation type: HLO temp
     ==========================

"""
TPU_SCORES = _TPU + _TPU_ROW.format(
    number=1,
    size="2.00G",
    name="jit(train_step)/jit(main)/jvp(Model)/h/0/self_attention/...qhd,...khd->...hqk/dot_general",
    shape="f32[32,4096,4096]{1,2,0:T(8,128)}",
    padding="",
)
TPU_PADDED = _TPU + _TPU_ROW.format(
    number=1,
    size="32.00G",
    name="slicewise/update/rem",
    shape="s32[8388608,8,4]{2,1,0:T(8,128)}",
    padding="     Extra memory due to padding: 31.00G (32.0x expansion)\n",
)
BFC = """W external/xla/bfc_allocator.cc:512] Allocator (GPU_0_bfc) ran out of memory trying to allocate \
4.00GiB (rounded to 4294967296)requested by op
I external/xla/xla/tsl/framework/bfc_allocator.cc:1102] Sum Total of in-use chunks: 65.19GiB
I external/xla/xla/tsl/framework/bfc_allocator.cc:1106] Stats:
Limit:                     77309411328
InUse:                     70000000000
MaxInUse:                  70100000000
NumAllocs:                        8123
"""
REPORTS = [
    (GPU_LOGITS, "logits"),
    (GPU_SMALL, "taken-elsewhere"),
    (_GPU_SCORES, "attention-scores"),
    (_GPU_RESIDUALS, "saved-residuals"),
    (_GPU_TWICE, "not-donated"),
    (_GPU_FLOAT32, "float32-residuals"),
    (_GPU_GATHERED, "gathered-parameters"),
    (_GPU_STATE, "training-state"),
    (TPU_SCORES, "attention-scores"),
    (TPU_PADDED, "padding"),
    (BFC, "fragmented-allocator"),
]
VIEWER = {
    "peakHeapMib": 97.0,
    "entryComputationParametersMib": 1.0,
    "maxHeap": [
        {
            "label": "fusion: 96 MiB",
            "logicalBufferSizeMib": 96.0,
            "instructionName": "fusion.3",
            "shapeString": "bf16[12,1024,4096]",
            "tfOpName": "jit(step)/jvp()/while/body/dot_general",
            "groupName": "Temporary",
            "sourceInfo": {"fileName": "/home/me/model.py", "lineNumber": 7},
        },
        {"logicalBufferSizeMib": 1.0, "instructionName": "p0", "shapeString": "f32[512,512]", "groupName": "Parameter"},
    ],
}
