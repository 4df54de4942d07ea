"""Names cannot become markup."""

from html.parser import HTMLParser

from hypothesis import given

from fulltilt.report.markup import Markup, element, join
from tests.anything import TEXT


class Seen(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_text_is_escaped_and_markup_is_kept():
    made = element("p", "<b>&", element("i", '"x"'), None, class_="a b", aria_label='"<', hidden=True, x=None)
    assert made == ('<p class="a b" aria-label="&quot;&lt;" hidden>&lt;b&gt;&amp;<i>&quot;x&quot;</i></p>')
    assert isinstance(made, Markup)


def test_lists_are_joined_and_their_text_escaped():
    assert join([["<", [element("rect", width=1.5)]], None]) == '&lt;<rect width="1.5"/>'


@given(TEXT, TEXT)
def test_any_name_stays_text(text, attribute):
    seen = Seen()
    seen.feed(element("p", text, title=attribute))
    seen.close()
    assert seen.tags == ["p"]
    assert [name for name, _ in seen.attributes] == ["title"]
