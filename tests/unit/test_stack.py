import pytest

from torchrec_adaptive._stack import check_stack, installed_versions

GOOD = {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}


def test_the_installed_stack_is_right() -> None:
    check_stack(installed_versions())
    check_stack(GOOD)
    check_stack({"torch": "2.13.1+cu130", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0"})


@pytest.mark.parametrize(
    ("versions", "named"),
    [
        (GOOD | {"torch": "2.14.1"}, ["torch 2.14.1", "torch 2.13.*", "pip install"]),
        (GOOD | {"torchrec": "1.9.0"}, ["torchrec 1.9.0", "pip install"]),
        (GOOD | {"fbgemm-gpu-cpu": "1.7.0"}, ["fbgemm-gpu-cpu 1.7.0", "pip install"]),
        (GOOD | {"fbgemm-gpu": "1.8.0"}, ["both builds of fbgemm", "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu"]),
        ({"torch": "2.13.0"}, ["torch 2.13.0", "pip install"]),
        ({}, ["none of them", "pip install"]),
    ],
)
def test_a_wrong_stack_is_refused_in_one_sentence(versions: dict[str, str], named: list[str]) -> None:
    with pytest.raises(ImportError) as caught:
        check_stack(versions)
    sentence = str(caught.value)
    assert all(part in sentence for part in named)
    assert sentence.endswith(".")
    assert "\n" not in sentence
