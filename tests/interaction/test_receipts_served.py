"""Receipts as clients get them: named in the result, read as a resource by their principal alone, proved by anybody."""

import base64
import hashlib
import json
import re
from pathlib import Path

import mcp_types as types
import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
from mcp.shared.exceptions import MCPError
from tests.interaction.served import connected

from glovebox_server.cli.main import main

pytestmark = [pytest.mark.driver("bubblewrap"), pytest.mark.usefixtures("runtime_dir")]

CODE = "open('/output/a.txt', 'w').write('kept')"


def glovebox(*words: str) -> Result:
    """One command to its end."""
    return CliRunner().invoke(main, words)


async def test_a_receipt_from_the_call_to_its_proof(tmp_path: Path) -> None:
    """The result names it, the resource gives it, the key comes from the command line, plain Ed25519 proves it."""
    workspace, state = tmp_path / "workspace", tmp_path / "state"
    workspace.mkdir()
    tmp_path.chmod(0o755)
    options = ["--workspace", str(workspace), "--state-dir", str(state)]
    async with connected("stdio", "modern", options) as client:
        ran = await client.call_tool("run_python", {"code": CODE})
        assert ran.meta is not None
        named = ran.meta["dev.glovebox/call"]["receipt"]
        (content,) = (await client.read_resource(named["uri"])).contents
        templates = await client.list_resource_templates()
    assert "receipt://{call_id}" in {each.uri_template for each in templates.resource_templates}
    assert isinstance(content, types.TextResourceContents)
    assert named["digest"] == "sha256:" + hashlib.sha256(content.text.encode()).hexdigest()
    (link,) = [block for block in ran.content if isinstance(block, types.ResourceLink)]

    pem = glovebox("receipt", "key", "--state-dir", str(state)).stdout
    assert json.loads(glovebox("receipt", "key", "--json", "--state-dir", str(state)).stdout)["public_key"] == pem
    key = load_pem_public_key(pem.encode())
    assert isinstance(key, Ed25519PublicKey)
    envelope = json.loads(content.text)
    payload, kind = base64.b64decode(envelope["payload"]), envelope["payloadType"]
    signed = f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode() + payload
    key.verify(base64.b64decode(envelope["signatures"][0]["sig"]), signed)
    key_id = hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()
    assert envelope["signatures"][0]["keyid"] == f"sha256:{key_id}"
    told = json.loads(payload)
    assert (kind, told["_type"]) == ("application/vnd.in-toto+json", "https://in-toto.io/Statement/v1")
    assert told["predicateType"] == "https://glovebox.dev/attestation/call/v1"
    assert all(set(each["digest"]) == {"sha256"} and each["name"] for each in told["subject"])
    kept = hashlib.sha256(b"kept").hexdigest()
    assert {"name": "artifact:a.txt", "digest": {"sha256": kept}, "uri": link.uri} in told["subject"]
    assert told["predicate"]["call"]["code"] == "sha256:" + hashlib.sha256(CODE.encode()).hexdigest()
    assert told["predicate"]["isolation"]["verified"] is True

    (tmp_path / "r.json").write_text(content.text)
    (tmp_path / "key.pem").write_text(pem)
    words = ["receipt", "verify", str(tmp_path / "r.json"), "--key", str(tmp_path / "key.pem")]
    done = glovebox(*words, "--audit", str(state / "audit"), "--json")
    assert (done.exit_code, json.loads(done.stdout)["ok"]) == (0, True), done.stdout
    (tmp_path / "r.json").write_text(content.text.replace("vnd.in-toto", "vnd.in-tolo"))
    done = glovebox(*words)
    assert done.exit_code == 1
    assert "payload is not application/vnd.in-toto+json" in done.stdout.replace("\n", " ")

    async with connected("http", "modern", options) as other:
        for uri in (named["uri"], "receipt://c_" + "0" * 26, "receipt://../x"):
            with pytest.raises(MCPError, match="You have no such call"):
                await other.read_resource(uri)


async def test_a_call_whose_tool_failed_is_a_failed_one_everywhere(tmp_path: Path) -> None:
    """Its job exits 0 and finds no such file: result, query, page, receipt and the caller's records agree."""
    workspace, state = tmp_path / "sales", tmp_path / "state"
    workspace.mkdir()
    tmp_path.chmod(0o755)
    options = ["--workspace", str(workspace), "--state-dir", str(state)]
    async with connected("stdio", "modern", options) as client:
        missing = await client.call_tool("read_workspace_file", {"path": "none.txt"})
        listed = await client.call_tool("list_workspace_files", {})
        assert (missing.is_error, listed.is_error) == (True, False)
        assert missing.structured_content is not None
        call_id = str(missing.structured_content["call_id"])
        (records,) = (await client.read_resource(f"audit://calls/{call_id}")).contents
    assert isinstance(records, types.TextResourceContents)
    assert '"failed":true' in records.text
    assert records.text.index('"kind":"sandbox.table"') < records.text.index('"kind":"sandbox.started"')
    assert "sales" not in records.text  # where it read is the operator's to know
    failed = json.loads(glovebox("audit", "query", "--outcome", "failed", "--json", "--state-dir", str(state)).stdout)
    assert [(each["call_id"], each["exit_code"]) for each in failed["calls"]] == [(call_id, 0)]
    page = " ".join(glovebox("audit", "show", call_id, "--state-dir", str(state)).stdout.split())
    assert "workspace sales" in page
    assert re.search(r"as planned; (\d+) of \1 fields hold", page)
    assert "failed, exit_code 0, its result is an error" in page.replace("exit code", "exit_code")
    shown = " ".join(glovebox("receipt", "show", call_id, "--state-dir", str(state)).stdout.split())
    assert "outcome.exit_code 0 outcome.failed True" in shown
    assert "dumpable 0 0 ok namespaces shared with the host [] [] [] ok" in shown  # from the table of the log
