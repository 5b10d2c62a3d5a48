import re

from kvferry.router.dashboard.files import DashboardFiles


def test_the_page_and_all_that_it_names_are_there() -> None:
    files = DashboardFiles.load()
    page = files.find("/dashboard")
    assert page is not None
    named = re.findall(r'(?:src|href)="(dashboard/[^"]+)"', page.body.decode())
    assert named == ["dashboard/style.css", "dashboard/dashboard.js"]
    for path in files.paths():
        found = files.find(path)
        assert found is not None
        for imported in re.findall(rb'from "\./([^"]+)"', found.body):
            assert files.find(f"/dashboard/{imported.decode()}") is not None
    assert files.find("/dashboard/../dashboard_files.py") is None
    assert files.find("/dashboard/") is None


def test_the_page_takes_nothing_from_elsewhere_and_has_no_script_or_style_inside() -> None:
    files = DashboardFiles.load()
    for path in files.paths():
        found = files.find(path)
        assert found is not None
        text = found.body.decode().replace("http://www.w3.org/2000/svg", "")
        assert re.findall(r"https?://|//cdn|@import|url\(", text) == []
        assert (
            re.findall(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function",
                text,
            )
            == []
        )
        if path == "/dashboard":
            assert re.findall(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=", text) == []


def test_each_file_says_its_type_and_the_policy() -> None:
    files = DashboardFiles.load()
    for path, kind in (
        ("/dashboard", "text/html"),
        ("/dashboard/style.css", "text/css"),
        ("/dashboard/dashboard.js", "text/javascript"),
    ):
        found = files.find(path)
        assert found is not None
        headers = dict(found.headers)
        assert headers["Content-Type"].startswith(kind)
        assert "script-src 'self'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
