"""The file of tenants: what is read, and every way in which it cannot work, with the file named and no key shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from antiphon.config import tenant_files
from antiphon.config.problems import SpecError
from antiphon.config.tenant_files import TenantSpec, TenantsSpec, TenantTable, auto_salt, read_tenants
from antiphon.core.tenants import tenant_of

KEY_A, KEY_B = "sk-of-a-alone", "sk-of-b-alone"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two files of keys."""
    (tmp_path / "a.keys").write_text(f"# tenant a\n{KEY_A}\nsk-of-a-too\n")
    (tmp_path / "b.keys").write_text(f"{KEY_B}\n")
    return tmp_path


def read(folder: Path, content: object) -> TenantTable:
    path = folder / "tenants.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return read_tenants(str(path))


def tenant(name: str, file: str, **knobs: Any) -> dict[str, Any]:
    return {"name": name, "api_key_files": [file], **knobs}


def problems(folder: Path, content: object) -> list[tuple[str, str, str]]:
    """Field, message and fix of each problem; the file's own name is left out of the field."""
    with pytest.raises(SpecError) as caught:
        read(folder, content)
    assert "sk-" not in str(caught.value), "no key is shown"
    assert all(problem.fix for problem in caught.value.problems)
    start = f"{folder / 'tenants.yaml'}: "
    assert all(problem.field.startswith((start, "router.tenants_file")) for problem in caught.value.problems)
    return [(each.field.removeprefix(start), each.message, each.fix) for each in caught.value.problems]


def test_what_a_file_says(folder: Path) -> None:
    table = read(
        folder,
        f"""
        in_flight_max: 64
        tenants:
          - name: search
            api_key_files: [a.keys]
            weight: 3
            requests_per_s: 2.5
            tokens_per_s: 1000
          - name: batch
            api_key_files: [{folder}/b.keys]
            cache_salt: batch-2
            may_salt: true
            concurrent_max: 4
        """,
    )
    search, batch = table.tenants
    assert search.keys == (KEY_A.encode(), b"sk-of-a-too")
    assert batch.keys == (KEY_B.encode(),)
    assert (search.salt, batch.salt) == (auto_salt("search"), "batch-2")
    assert (search.spec.weight, search.spec.requests_per_s, search.spec.queue_max) == (3, 2.5, 64)
    assert (batch.spec.may_salt, batch.spec.concurrent_max, search.spec.may_salt) == (True, 4, False)
    assert (table.spec.in_flight_max, table.spec.wait_max_s) == (64, 30)
    assert KEY_A not in repr(table)


def test_files_of_keys_that_others_can_read_are_told_once_each(folder: Path) -> None:
    for name, mode in (("a.keys", 0o640), ("b.keys", 0o600)):
        (folder / name).chmod(mode)
    table = read(folder, {"tenants": [tenant("a", "a.keys"), tenant("b", "b.keys")]})
    (text,) = table.open_files()
    assert text.startswith(f"{folder / 'a.keys'} is open to other users of this host (mode 0640)")
    (folder / "a.keys").chmod(0o600)
    assert list(table.open_files()) == []


def test_a_salt_of_its_own_is_the_same_everywhere_and_a_name_at_the_cache_server() -> None:
    assert auto_salt("search") == "tenant-c4aca0a95e5cd3d9862e4798", "routers must agree, of other versions too"
    assert auto_salt("search") != auto_salt("search2")
    assert tenant_of(auto_salt("search")) == auto_salt("search")
    assert tenant_of(f"{auto_salt('search')}.{'0' * 32}") == f"{auto_salt('search')}.{'0' * 32}"


def test_tenants_without_a_salt_share(folder: Path) -> None:
    tenants = [tenant("a", "a.keys", cache_salt="none"), tenant("b", "b.keys", cache_salt="none")]
    assert [each.salt for each in read(folder, {"tenants": tenants}).tenants] == [None, None]


@pytest.mark.parametrize(
    ("knobs", "field", "words"),
    [
        ({"weight": 0}, "weight", "out of range"),
        ({"weight": "much"}, "weight", "much"),
        ({"requests_per_s": -1}, "requests_per_s", "out of range"),
        ({"burst": 5}, "burst", "limits nothing"),
        ({"tokens_burst": 5}, "tokens_burst", "limits nothing"),
        ({"queue_max": -1}, "queue_max", "out of range"),
        ({"concurrent_max": 0}, "concurrent_max", "out of range"),
        ({"name": "a b"}, "name", "does not match"),
        ({"name": 5}, "name", "must be text"),
        ({"api_key_files": []}, "api_key_files", "at least 1"),
        ({"api_key_files": "a.keys"}, "api_key_files", "must be a list"),
        ({"wieght": 2}, "wieght", "not a known key"),
        ({"cache_salt": "a@b"}, "cache_salt", "is no salt"),
        ({"cache_salt": "a.b"}, "cache_salt", "is no salt"),
        ({"cache_salt": "x" * 32}, "cache_salt", "is no salt"),
        ({"cache_salt": ""}, "cache_salt", "is no salt"),
        ({"cache_salt": "tenant-1"}, "cache_salt", "Antiphon's own"),
        ({"cache_salt": "default"}, "cache_salt", "Antiphon's own"),
        ({"cache_salt": None}, "cache_salt", "must be text"),
        ({"api_key_files": ["no.keys"]}, "api_key_files[0]", "no.keys cannot be read"),
        ({"api_key_files": ["a.keys", "empty"]}, "api_key_files[1]", "empty is empty"),
    ],
)
def test_a_tenant_that_cannot_work(folder: Path, knobs: dict[str, Any], field: str, words: str) -> None:
    (folder / "empty").write_text("# nothing\n")
    good = tenant("good", "b.keys")
    ((where, message, _),) = problems(folder, {"tenants": [good, tenant("a", "a.keys") | knobs]})
    assert where == f"tenants[1].{field}"
    assert words in message


def test_a_key_in_the_file_itself_is_refused_and_not_repeated(folder: Path) -> None:
    for name in ("api_key", "api_keys"):
        ((where, message, fix),) = problems(folder, {"tenants": [tenant("a", "a.keys", **{name: "sk-secret"})]})
        assert where == "tenants[0]"
        assert "no place for secrets" in message
        assert "api_key_files" in fix


def test_what_two_tenants_may_not_share(folder: Path) -> None:
    (folder / "both.keys").write_text(f"sk-more\n{KEY_A}\n")
    assert [
        (field, message)
        for field, message, _ in problems(
            folder,
            {
                "tenants": [
                    tenant("a", "a.keys", cache_salt="one"),
                    tenant("b", "both.keys", cache_salt="one"),
                    tenant("a", "b.keys"),
                ]
            },
        )
    ] == [
        ("tenants[1].cache_salt", "is the salt of a too, which would share their KV"),
        ("tenants[1].api_key_files", "a and b have a key in common"),
        ("tenants[2].name", "a is the name of tenants[0] too"),
    ]


def test_a_key_may_stand_in_two_files_of_one_tenant(folder: Path) -> None:
    table = read(folder, {"tenants": [{"name": "a", "api_key_files": ["a.keys", "a.keys"]}]})
    assert len(table.tenants[0].keys) == 2


def test_all_problems_are_told_at_once(folder: Path) -> None:
    content = {
        "in_flight_max": 0,
        "wait_s": 3,
        "tenants": ["a", tenant("b", "b.keys", weight=-1, queue_max=-1), {"api_key_files": ["gone"]}],
    }
    fields = [field for field, _, _ in problems(folder, content)]
    assert fields == [
        "in_flight_max",
        "wait_s",
        "tenants[0]",
        "tenants[1].weight",
        "tenants[1].queue_max",
        "tenants[2].name",
    ]


@pytest.mark.parametrize("content", ["", "tenants:\n", "tenants: []\n", "tenants: {}\n", "tenants: 3\n"])
def test_a_file_without_tenants(folder: Path, content: str) -> None:
    ((field, message, _),) = problems(folder, content)
    assert (field, message) == ("tenants", "must be a list of 1 to 1000 tenants")


@pytest.mark.parametrize("content", ["- a\n", "tenants: [\n", "tenants: []\ntenants: []\n"])
def test_a_file_that_is_none(folder: Path, content: str) -> None:
    ((field, message, _),) = problems(folder, content)
    assert field == "router.tenants_file"
    assert message.startswith(str(folder / "tenants.yaml"))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read") as caught:
        read_tenants(str(tmp_path / "gone.yaml"))
    assert caught.value.problems[0].field == "router.tenants_file"


def test_how_many_keys_there_may_be(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_files, "KEYS_MAX", 2)
    ((field, message, _),) = problems(folder, {"tenants": [tenant("a", "a.keys"), tenant("b", "b.keys")]})
    assert (field, message) == ("tenants", "have more than 2 keys in all")


def test_docs_describe_every_knob() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tenants.md").read_text()
    for model, in_list in ((TenantsSpec, False), (TenantSpec, True)):
        for name, field in model.model_fields.items():
            shown = f"`tenants[].{name}`" if in_list else f"`{name}`"
            assert f"| {shown} |" in page, name
            assert field.description
            assert field.description in page, name


def test_docs_show_a_file_that_works(folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tenants.md").read_text()
    (folder / "keys").mkdir()
    for name in ("search", "batch-1", "batch-2"):
        (folder / "keys" / name).write_text(f"sk-{name}\n")
    table = read(folder, page.split("```yaml\n")[1].split("```")[0])
    assert [(entry.spec.name, len(entry.keys)) for entry in table.tenants] == [("search", 1), ("batch", 2)]
