"""docs/security.md makes certificates in five lines: these are run, and processes take what comes of them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bough.config.processes import OrchestratorConfig, TargetConfig
from bough.config.reader import parse
from bough.security.access import Access
from bough.security.certificates import CertificateFiles, read_certificates

GUIDE = Path("docs/security.md")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_processes_accept_the_guides_certificates(tmp_path: Path) -> None:
    (commands,) = re.findall(r"```\n(openssl req -x509.*?)```", GUIDE.read_text(), re.DOTALL)
    subprocess.run(["bash", "-euc", commands], cwd=tmp_path, check=True, capture_output=True)
    cert, key, authority = (str(tmp_path / name) for name in ("10.0.0.1/tls.pem", "10.0.0.1/tls.key", "ca.pem"))
    certificates = read_certificates(CertificateFiles(cert, key, authority), is_server=True)
    assert certificates.names == ("10.0.0.1", "127.0.0.1", "localhost")
    environ = {"BOUGH_TLS_CERT": cert, "BOUGH_TLS_KEY": key, "BOUGH_TLS_CA": authority}
    for kind, flags in ((TargetConfig, ["--model", "m"]), (OrchestratorConfig, [])):
        access = Access.of(parse(kind, "service", flags, environ))
        assert access.worker_credentials is not None


def test_settings_in_the_guide_exist() -> None:
    named = set(re.findall(r"`?(--tls-[a-z-]+)", GUIDE.read_text()))
    known = {
        "--" + name.replace("_", "-") for name in OrchestratorConfig.__dataclass_fields__ if name.startswith("tls")
    }
    assert named == known
