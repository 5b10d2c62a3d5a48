"""Tests which instances `kvferry proxy` takes from its flags and from its file."""

from pathlib import Path

from kvferry.cli.main import make_parser
from kvferry.cli.proxy import router_options
from kvferry.router.fleet.instances import Role
from kvferry.router.fleet.services import ServiceName
from kvferry.router.options import RouterOptions


def options(*flags: str) -> RouterOptions:
    return router_options(make_parser("proxy").parse(list(flags)))


def urls(found: RouterOptions) -> list[str]:
    return [instance.url for instance in (*found.prefillers, *found.decoders)]


def test_urls_of_instances_and_names_of_services_may_be_mixed() -> None:
    found = options(
        *("--prefillers", "dns://p.example:8000", "http://10.0.0.1:8000"),
        *("--decoder-hosts", "10.0.0.2", "--decoder-ports", "8000", "--decoders", "10.0.0.3:8000"),
    )
    assert found.services == (ServiceName(Role.PREFILL, "p.example", 8000),)
    assert urls(found) == ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://10.0.0.3:8000"]


def test_a_role_without_flags_has_its_default_and_a_role_with_a_service_has_none() -> None:
    assert urls(options("--prefillers", "dns://p.example:8000")) == ["http://localhost:8200"]


def test_flags_of_one_role_replace_what_the_file_says_about_that_role(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text(
        'prefillers = ["dns://p.example:1", "http://10.0.0.1:1"]\n'
        'decoders = ["dns://d.example:1", "http://10.0.0.2:1"]\n'
    )
    both = options("--config", str(file))
    assert [str(service) for service in both.services] == ["dns://p.example:1", "dns://d.example:1"]
    assert urls(both) == ["http://10.0.0.1:1", "http://10.0.0.2:1"]
    changed = options("--config", str(file), "--decoders", "dns://other.example:2")
    assert [str(service) for service in changed.services] == [
        "dns://p.example:1",
        "dns://other.example:2",
    ]
    assert urls(changed) == ["http://10.0.0.1:1"]
