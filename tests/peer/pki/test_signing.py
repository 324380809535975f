"""What `fedh2l pki sign` does not write over: others choose the names in requests, and of their files."""

from __future__ import annotations

import pytest

from fedh2l.peer.pki import certificates
from fedh2l.peer.pki.authority import Authority
from fedh2l.peer.pki.certificates import PKIError
from members import join


def request(folder, name):
    path, _ = certificates.request(folder, name, ["127.0.0.1"])
    return path


def test_no_node_is_named_like_the_federation(tmp_path):
    founder = Authority.found(tmp_path / "authority", "zoo")
    with pytest.raises(PKIError, match="has the name of the federation"):
        founder.sign(certificates.read_request(request(tmp_path / "keys", "zoo")))
    assert founder.issued() == []


def test_the_certificate_of_the_authority_is_not_overwritten(tmp_path, invoke):
    founder = Authority.found(tmp_path / "authority", "zoo")
    path = tmp_path / "authority" / "ca.csr"
    request(tmp_path / "keys", "zoo").rename(path)
    before = (tmp_path / "authority" / "ca.pem").read_bytes()
    code, _, err = invoke("pki", "sign", path, "--dir", tmp_path / "authority", "--yes")
    assert code == 2
    assert "is there and is no certificate of 'zoo'" in " ".join(err.split())
    assert (tmp_path / "authority" / "ca.pem").read_bytes() == before
    join(founder, tmp_path / "north")


def test_a_certificate_is_renewed(tmp_path, invoke):
    Authority.found(tmp_path / "authority", "zoo")
    path = request(tmp_path / "keys", "north")
    for _ in range(2):
        assert invoke("pki", "sign", path, "--dir", tmp_path / "authority", "--yes")[0] == 0
