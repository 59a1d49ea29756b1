"""Runs in the peers' environment: llama.cpp's server, from the package xllamacpp.

python peer_llama.py convert DEMO.gguf OUT.gguf F16|Q8_0     write the demo model again with other weights
python peer_llama.py serve MODEL.gguf PORT THREADS           serve until killed
"""

from __future__ import annotations

import signal
import sys

CONTEXT = 4608
SLOTS = 16


def convert(source: str, target: str, kind: str) -> None:
    import gguf

    reader = gguf.GGUFReader(source)
    wanted = gguf.GGMLQuantizationType[kind]
    architecture = reader.get_field("general.architecture").contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        value_type = field.types[0]
        sub_type = field.types[-1] if value_type == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), value_type, sub_type=sub_type)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) < 2:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def serve(model: str, port: int, threads: int) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.model_alias = ["peer"]
    params.port = port
    params.n_parallel = SLOTS
    # The context is split over the slots.
    params.n_ctx = CONTEXT * SLOTS
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    signal.pause()
    del server


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        convert(*sys.argv[2:5])
    else:
        serve(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
