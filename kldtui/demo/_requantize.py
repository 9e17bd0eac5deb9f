"""Makes another quantization of a GGUF model, in a process of its own.

Knows: gguf-py, whose `quantize` gives the same blocks as llama-quantize. A process of its own
since it holds the interpreter for seconds and a few hundred MB for good.
Must not know: anything of kldtui. Run by path (`python -P _requantize.py SOURCE TARGET Q5_0`);
writes `{"done": n, "total": n}` (bytes of the source) to the descriptor of KLDTUI_REPORT_FD.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import gguf

_KEPT = (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
_FILE_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q8_0": 7}


def main(source: Path, target: Path, type_name: str) -> None:
    model = gguf.GGUFReader(source)
    kind = gguf.GGMLQuantizationType[type_name]
    writer = gguf.GGUFWriter(target, model.fields["general.architecture"].contents())
    copy_metadata(model, writer, _FILE_TYPES[type_name])
    total = sum(int(tensor.n_bytes) for tensor in model.tensors)
    done = 0
    for tensor in model.tensors:
        data, stored_as = tensor.data, tensor.tensor_type
        # The embedding doubles as the output layer here: requantized, it would cost the most.
        if stored_as not in _KEPT and tensor.name != "token_embd.weight":
            data, stored_as = gguf.quantize(gguf.dequantize(data, stored_as), kind), kind
        writer.add_tensor(tensor.name, data, raw_dtype=stored_as)
        done += int(tensor.n_bytes)
        report(done=done, total=total)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def copy_metadata(model: gguf.GGUFReader, writer: gguf.GGUFWriter, file_type: int) -> None:
    written_by_itself = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count")
    for name, field in model.fields.items():
        if name in written_by_itself or name == "general.architecture":
            continue
        value = file_type if name == "general.file_type" else field.contents()
        item = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, field.types[0], sub_type=item)


def report(**fields: int) -> None:
    descriptor = os.environ.get("KLDTUI_REPORT_FD")
    if descriptor is not None:
        os.write(int(descriptor), json.dumps(fields).encode() + b"\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
