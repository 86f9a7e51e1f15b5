"""The INT8 network as an MLflow model: signature from the graph, fixed requirements, a hash of the stored bytes."""

from __future__ import annotations

import copy
import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import DataError, ModelError

if TYPE_CHECKING:
    import onnx
    from mlflow.models import ModelSignature

MODEL_HASH_TAG = "bevj6.model_sha256"
REQUIREMENTS = ("mlflow", "onnx", "onnxruntime", "numpy")


def read_onnx(path: Path) -> onnx.ModelProto:
    """Load an ONNX file.

    Raises:
        ModelError: missing, cut or not ONNX.
    """
    import onnx

    try:
        return onnx.load(path)
    except FileNotFoundError:
        raise ModelError(f"{path}: file not found") from None
    except Exception as error:  # protobuf raises its own DecodeError, whose module is not stable
        raise ModelError(f"{path}: not an ONNX model ({error})") from error


def log_int8_model(path: Path, name: str, tags: dict[str, str], params: dict[str, Any]) -> tuple[str, str]:
    """Log the model at `path` under the active MLflow run. Returns its URI and the sha256 of the stored file."""
    import mlflow

    model = read_onnx(path)
    info = mlflow.onnx.log_model(
        copy.deepcopy(model),  # log_model changes what it is given
        name=name,
        signature=graph_signature(model),
        pip_requirements=[f"{package}=={version(package)}" for package in REQUIREMENTS],
        save_as_external_data=False,
        onnx_execution_providers=["CPUExecutionProvider"],
        tags=tags,
        params=params,
    )
    return info.model_uri, hashlib.sha256(model.SerializeToString()).hexdigest()


def graph_signature(model: onnx.ModelProto) -> ModelSignature:
    """Names, types and shapes of the graph's inputs and outputs; a symbolic dimension becomes -1."""
    from mlflow.models import ModelSignature
    from mlflow.types import Schema

    initializers = {tensor.name for tensor in model.graph.initializer}
    inputs = [_tensor_spec(value) for value in model.graph.input if value.name not in initializers]
    return ModelSignature(Schema(inputs), Schema([_tensor_spec(value) for value in model.graph.output]))


def _tensor_spec(value: onnx.ValueInfoProto) -> Any:
    from mlflow.types import TensorSpec
    from onnx.helper import tensor_dtype_to_np_dtype

    tensor = value.type.tensor_type
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim)
    return TensorSpec(tensor_dtype_to_np_dtype(tensor.elem_type), shape, value.name)


def verify_stored_model(model_uri: str, expected_sha256: str) -> None:
    """Fetch a logged model, compare its bytes with the hash taken when it was logged, and check that onnxruntime opens it.

    Raises:
        DataError: the bytes differ or the file is gone.
        ModelError: onnxruntime refuses the model.
    """
    import tempfile

    import mlflow
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        file = Path(mlflow.artifacts.download_artifacts(model_uri, dst_path=folder)) / "model.onnx"
        if not file.is_file():
            raise DataError(f"{model_uri}: model.onnx is missing in the artifact store")
        content = file.read_bytes()
    actual = hashlib.sha256(content).hexdigest()
    if actual != expected_sha256:
        raise DataError(f"{model_uri}: model.onnx has sha256 {actual}, logged was {expected_sha256}: it was changed after it was logged")
    try:
        onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions are not importable names
        raise ModelError(f"{model_uri}: onnxruntime cannot open it ({error})") from error
