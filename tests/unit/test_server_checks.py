"""A server's keys: no password in a URL, no option set by the launcher or opening the server."""

import json

import pytest

from megatron_dapo.checks.rollout_checks import REFUSED_OPTIONS
from megatron_dapo.checks.run_checks import load_and_validate, validate
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.derived import is_server_url
from megatron_dapo.config.loader import load_config
from megatron_dapo.servers.server_list import parse_urls
from tests.config_overrides import SOUND, mistakes

pytestmark = pytest.mark.unit

SERVER = "actor_rollout_ref.rollout.server"
PASSWORD_URLS = ["http://me:secret@host:30000", "http://secret@host:30000", "http://me:se@cret@host:1"]


@pytest.mark.parametrize("option", REFUSED_OPTIONS)
@pytest.mark.parametrize("form", ["{}", "{}=7"])
def test_an_option_that_the_launcher_sets_or_that_opens_a_server_is_refused(option, form):
    (sentence,) = mistakes(f"rollout.server.extra_args=[{form.format(option)}]")
    assert option in sentence and REFUSED_OPTIONS[option] in sentence


def test_an_option_is_refused_under_a_shorter_name_too():
    """argparse takes any beginning of exactly one option."""
    (sentence,) = mistakes("rollout.server.extra_args=[--trust-rem]")
    assert "--trust-rem" in sentence and "--trust-remote-code" in sentence


@pytest.mark.parametrize(
    "arguments", ["--context-length,'24576'", "--log-level,debug", "--kv-cache-dtype,fp8_e5m2", "--enable-metrics"]
)
def test_other_options_go_to_the_server_as_they_are(arguments):
    assert mistakes(f"rollout.server.extra_args=[{arguments}]") == []


@pytest.mark.parametrize(
    ("arguments", "is_refused"),
    [
        ("--quantization,fp8", True),
        ("--quantization=fp8", True),
        ("--quantization,fp8,--load-format,auto", True),
        ("--quantization,fp8,--load-format,flash_rl", False),
        ("--load-format=flash_rl,--quantization=fp8", False),
        ("--load-format,flash_rl,--quantization,fp8,--load-format,auto", True),
    ],
)
def test_quantized_parameters_are_refused_but_for_the_format_that_takes_our_weights(arguments, is_refused):
    refusals = mistakes(f"rollout.server.extra_args=[{arguments}]")
    assert len(refusals) == is_refused
    assert all("--quantization fp8" in sentence and "--load-format flash_rl" in sentence for sentence in refusals)


@pytest.mark.parametrize("url", PASSWORD_URLS)
def test_a_password_in_a_servers_url_is_refused_and_never_shown(url):
    for settings in (
        [f"actor_rollout_ref.rollout.server_urls=['{url}']"],
        [f"actor_rollout_ref.rollout.server_urls={url}"],
        [f"actor_rollout_ref.rollout.server_urls=['{url}'"],
        [f"actor_rollout_ref.rollout.server_url={url}"],
    ):
        with pytest.raises(UserError) as error:
            load_and_validate(None, [*SOUND, *settings], check_files=False)
        assert "***@host" in str(error.value)
        assert "secret" not in error.value.report() and "cret" not in error.value.report()
    with pytest.raises(UserError) as error:
        parse_urls(url, "urls.txt")
    assert "secret" not in str(error.value)


def test_nothing_stands_behind_the_port_of_a_url():
    assert is_server_url("http://host:1/") and is_server_url("https://[::1]:30001")
    assert not any(is_server_url(f"http://host:1{more}") for more in ("/path", "?a=b", "#a", "/?a"))


@pytest.mark.parametrize(
    "name",
    ["../../x", "..", ".", "/abs", "a/../../b", "a//b", "", "a/", "a\x00b", "a\nb", "a\x1b[2J", "é\u2028", "x" * 201],
)
def test_a_name_that_leads_out_of_the_runs_folder_or_is_no_name_is_refused(name):
    with pytest.raises(UserError) as error:
        validate(load_config(None, [*SOUND, f"trainer.experiment_name={json.dumps(name)}"]), None, check_files=False)
    (sentence,) = error.value.sentences
    assert "trainer.experiment_name" in sentence and sentence.isprintable()


@pytest.mark.parametrize("name", ["run", "group/run 1", "é", "..a", "a..b", "-x", "x" * 200])
def test_other_names_are_folders_below_runs(name):
    validate(load_config(None, [*SOUND, f"trainer.experiment_name={json.dumps(name)}"]), None, check_files=False)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "x" * 300, ""])
def test_a_host_that_is_not_this_machines_is_refused(host):
    refusals = [text for text in machine_mistakes(f"{SERVER}.host={host}") if f"{SERVER}.host" in text]
    assert len(refusals) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_an_address_of_this_machine_is_taken(host):
    assert not [text for text in machine_mistakes(f"{SERVER}.host={host}") if f"{SERVER}.host" in text]


def test_where_servers_are_elsewhere_the_host_is_not_this_machines_business():
    elsewhere = ("actor_rollout_ref.rollout.server_urls=[http://192.0.2.1:1]", f"{SERVER}.nnodes=1")
    for setting in elsewhere:
        assert not [text for text in machine_mistakes(f"{SERVER}.host=192.0.2.1", setting) if f"{SERVER}.host" in text]


def machine_mistakes(*settings: str) -> list[str]:
    with pytest.raises(UserError) as error:
        load_and_validate(None, list(settings))
    return error.value.sentences
