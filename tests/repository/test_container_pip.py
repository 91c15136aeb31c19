"""The settings of pip that the build of a container gets."""

from configparser import ConfigParser

from tests import container_pip


def test_paths_of_this_machine_are_mounted_and_renamed(tmp_path):
    certificate = tmp_path / "ca.crt"
    certificate.touch()
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    simple = tmp_path / "mirror" / "simple"
    simple.mkdir(parents=True)
    printed = [
        ":env:.find-links='/nowhere https://example.org/wheels'",
        f"global.cert='{certificate}'",
        f"global.extra-index-url='file://{simple} https://example.org/simple'",
        "global.find-links='/elsewhere'",
        f"install.constraint='\\n{wheels}\\n/nowhere'",
    ]
    settings = container_pip.read_settings(printed)
    assert container_pip.move_paths(settings) == {certificate, wheels, simple.parent}
    assert dict(settings["global"]) == {
        "cert": f"/host{certificate}",
        "extra-index-url": f"file:///host{simple} https://example.org/simple",
        "find-links": "/nowhere https://example.org/wheels",
    }
    assert dict(settings["install"]) == {"constraint": f"/host{wheels} /nowhere"}


def test_what_is_printed_mounts_the_settings(tmp_path, monkeypatch, capsys):
    certificate = tmp_path / "ca.crt"
    certificate.touch()
    monkeypatch.setenv("PIP_CERT", str(certificate))
    container_pip.main(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"--volume={tmp_path / 'pip.conf'}:/etc/pip.conf:ro"
    assert f"--volume={certificate}:/host{certificate}:ro" in lines[1:]
    written = ConfigParser(interpolation=None)
    written.read(tmp_path / "pip.conf")
    assert written["global"]["cert"] == f"/host{certificate}"
