"""`moe-megakernel doctor` on machines that are described, not present: other architectures, no driver, no peers."""

import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from moe_megakernel import backends
from moe_megakernel.cli import devices as devices_module
from moe_megakernel.cli.devices import Devices, Gpu, _probe_with_driver, probe, symmetric_memory_reason
from moe_megakernel.cli.doctor import diagnose, render
from moe_megakernel.cli.main import app


def machine(*capabilities, peers=None, shareable=True):
    gpus = tuple(Gpu(f"GPU of sm_{a}{b}", (a, b), 80 << 30, 100, shareable) for a, b in capabilities)
    everyone = tuple(tuple(True for _ in gpus) for _ in gpus)
    return Devices(gpus, everyone if peers is None else peers, cuda_driver="13.0", nvidia_driver="580.1")


def text_of(report):
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    render(report, console)
    return console.export_text()


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_a26_names_built_and_found_archs(monkeypatch, capability):
    monkeypatch.setattr(backends, "built_capabilities", lambda: ((9, 0),))
    report = diagnose(machine(capability), torch_cuda="13.0")
    gpu = report["devices"][1]
    assert gpu["device"] == "cuda:0"
    assert gpu["auto_backend"] == "reference"
    for name in ("mega", "staged"):
        assert "sm_90" in gpu["backends"][name]
        assert f"sm_{capability[0]}{capability[1]}" in gpu["backends"][name]
    assert f"built sm_90; found sm_{capability[0]}{capability[1]}" in text_of(report)


def test_a26_build_without_kernels_says_so(monkeypatch):
    monkeypatch.setattr(backends, "built_capabilities", lambda: ())
    report = diagnose(machine((9, 0)), torch_cuda="13.0")
    assert "not in this build" in report["devices"][1]["backends"]["mega"]
    assert "built none; found sm_90" in text_of(report)


def test_built_arch_is_taken(monkeypatch):
    monkeypatch.setattr(backends, "built_capabilities", lambda: ((9, 0),))
    report = diagnose(machine((9, 0)), torch_cuda="13.0")
    assert report["devices"][1]["auto_backend"] == "mega"
    assert report["devices"][0]["auto_backend"] == "reference", "the CPU stays with the reference"
    text = text_of(report)
    assert f"mega and staged take {report['kernels_take']}; the reference runs the rest" in text
    assert report["transport_rule"] in " ".join(text.split())


def test_transports_of_a_gpu_with_and_without_kernels(monkeypatch):
    monkeypatch.setattr(backends, "built_capabilities", lambda: ((9, 0),))
    report = diagnose(machine((9, 0)), torch_cuda="13.0")
    assert report["devices"][1]["transports"] == {"peer": "", "collective": ""}
    assert report["devices"][1]["auto_transport"] == "peer"
    assert report["devices"][0]["transports"]["peer"] == "needs CUDA devices"
    assert "yes, auto takes it if all ranks can share memory" in text_of(report)
    older = diagnose(machine((8, 0)), torch_cuda="13.0")["devices"][1]
    assert older["transports"]["peer"] == "needs the backend mega or staged"
    assert older["auto_transport"] == "collective"


def test_gpu_under_a_torch_without_cuda_is_not_used():
    report = diagnose(machine((9, 0)), torch_cuda=None)
    gpu = report["devices"][1]
    assert gpu["auto_backend"] is None
    assert gpu["backends"]["reference"] == "this torch is built without CUDA"
    assert report["symmetric_memory"] == {"available": False, "reason": "this torch is built without CUDA"}


def test_symmetric_memory_reasons():
    assert symmetric_memory_reason(Devices(), "13.0") == "no GPU"
    assert symmetric_memory_reason(machine((9, 0), (9, 0)), "13.0") == ""
    one_way = ((True, True), (False, True))
    assert symmetric_memory_reason(machine((9, 0), (9, 0), peers=one_way), "13.0") == (
        "GPU 1 cannot reach the memory of GPU 0"
    )
    assert "file descriptor" in symmetric_memory_reason(machine((9, 0), shareable=False), "13.0")


def test_peer_matrix_is_shown():
    text = text_of(diagnose(machine((9, 0), (9, 0), peers=((True, False), (True, True))), torch_cuda="13.0"))
    assert "Peer access" in text
    assert "no" in text.split("Peer access")[1].split("Symmetric memory")[0]


class FakeDriver:
    """The part of cuda.bindings.driver that the probe uses, for GPUs of one kind."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=SimpleNamespace(name="CUDA_SUCCESS"))

    class CUdevice_attribute:
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 10
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 0
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 148
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 1

    def __init__(self, count, init="CUDA_SUCCESS"):
        self.count = count
        self.ok = self.CUresult.CUDA_SUCCESS
        self.init = self.ok if init == "CUDA_SUCCESS" else SimpleNamespace(name=init)

    def cuInit(self, flags):
        return (self.init,)

    def cuDriverGetVersion(self):
        return self.ok, 12080

    def cuDeviceGetCount(self):
        return self.ok, self.count

    def cuDeviceGet(self, index):
        return self.ok, index

    def cuDeviceGetName(self, length, handle):
        return self.ok, b"Fake B200\0\0\0"

    def cuDeviceTotalMem(self, handle):
        return self.ok, 180 << 30

    def cuDeviceGetAttribute(self, attribute, handle):
        return self.ok, attribute

    def cuDeviceCanAccessPeer(self, a, b):
        return self.ok, int(a < b)


def test_driver_answers_become_data():
    found = _probe_with_driver(FakeDriver(2))
    assert [gpu.name for gpu in found.gpus] == ["Fake B200", "Fake B200"]
    assert found.gpus[0] == Gpu("Fake B200", (10, 0), 180 << 30, 148, shareable=True)
    assert found.peers == ((True, True), (False, True))
    assert found.cuda_driver == "12.8"


def test_driver_without_gpu_is_a_note():
    found = _probe_with_driver(FakeDriver(0, init="CUDA_ERROR_NO_DEVICE"))
    assert found.gpus == ()
    assert "CUDA_ERROR_NO_DEVICE" in found.note


def test_broken_driver_is_a_note(monkeypatch):
    def broken(driver):
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(devices_module, "_probe_with_driver", broken)
    found = probe()
    assert found.gpus == ()
    assert "libcuda" in found.note or "cuda-python is not installed" in found.note


def test_json_is_all_that_is_printed():
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert report["devices"][0] == {
        "device": "cpu",
        "backends": backends.available_backends("cpu"),
        "transports": backends.available_transports("cpu"),
        "auto_backend": "reference",
        "auto_transport": "collective",
    }
    assert set(report["native_library"]) == {"loaded", "path", "reason"}


def test_tables_print_and_cuda_stays_uninitialised():
    was_initialised = torch.cuda.is_initialized()
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for title in ("Versions", "Symmetric memory", "Backends and transports"):
        assert title in result.stdout
    assert torch.cuda.is_initialized() == was_initialised
