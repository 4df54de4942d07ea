"""Vietnamese-like social text in three classes, as people type it: teencode, missing accents, stretched letters.

    train.csv, validation.csv    columns text and label (negative, neutral, positive)

What a text means stands in a few label-bearing words among topic and filler words; a negation turns a word into its
opposite, a decoy of another class appears beside the real ones, and one label in thirty is simply wrong, as in any
set that people have labelled.
"""

from __future__ import annotations

import csv
import random
import unicodedata
from collections.abc import Iterator
from pathlib import Path

LABELS = ("negative", "neutral", "positive")
_WEIGHTS = (35, 20, 45)
VALIDATION_SHARE = 0.2
_WRONG_LABELS = 1 / 30
_PIECE = 500

_BEARING = {
    "negative": (
        "tệ dở chán ghét buồn thất_vọng kém bực tức_giận lừa_đảo kinh_khủng nhạt phí_tiền xấu hỏng chậm rác sợ đau ồn "
        "bẩn đắt vô_duyên tồi ức_chế phiền lỗi giả cáu mệt"
    ),
    "neutral": (
        "hỏi bình_thường tạm giá bao_nhiêu ở_đâu thông_tin mấy_giờ địa_chỉ khi_nào tham_khảo chi_tiết lịch inbox "
        "cho_hỏi ship mã_số cỡ loại_nào đăng_ký"
    ),
    "positive": (
        "đẹp hay tốt yêu thích tuyệt_vời ngon vui xuất_sắc đỉnh mê hài_lòng cảm_ơn dễ_thương nhanh chất xịn ưng "
        "thơm ấm_áp rẻ hạnh_phúc tự_hào ủng_hộ chu_đáo sạch giỏi mượt bền đáng_tiền"
    ),
}
_TOPICS = (
    "phim quán áo điện_thoại món bài_hát ca_sĩ trận đội shop giao_hàng nhân_viên phòng khách_sạn video game máy pin "
    "sách giày cà_phê trà_sữa bún phở xe trường thầy cô bạn admin clip nhạc mùi màu da tóc"
)
_FILLERS = (
    "mình tôi bạn nó hôm_nay hôm_qua thì là mà và với cho của này kia rồi luôn nha nhé ạ vậy gì được biết nói xem mua "
    "đi về làm có một hai lần cũng vẫn đang sẽ người nhà đây đó thấy nghe trong ngoài trên nhưng vì nên lúc sau trước"
)
_INTENSIFIERS = ("quá", "rất", "lắm", "thật", "cực", "siêu")
_NEGATIONS = ("không", "chưa", "chẳng")
_OPPOSITE = {"negative": "positive", "positive": "negative"}
_TEENCODE = {
    "không": ("ko", "k", "hok", "hong", "khum"),
    "được": ("dc", "đc", "đk"),
    "quá": ("wa", "qá", "quáaa"),
    "gì": ("j", "gỳ"),
    "vậy": ("v", "z"),
    "rồi": ("r", "rùi", "ròi"),
    "yêu": ("iu", "yêuuu"),
    "biết": ("bít", "bik"),
    "bạn": ("b", "pạn"),
    "mình": ("m", "mik"),
    "thích": ("thik", "thíchhh"),
    "với": ("vs", "zới"),
    "cảm_ơn": ("tks", "cám ơn", "thanks"),
    "nhé": ("nhá", "nhaaa"),
    "bình_thường": ("bth", "bt"),
    "bao_nhiêu": ("bn", "bnhiu"),
}
_ENDINGS = {"negative": (":(", "=((", "😡"), "neutral": ("?", "ạ?", ".."), "positive": (":)", "❤️", "=))")}


def make(folder: Path, size: int, seed: int) -> Iterator[int]:
    """Write both files; yields how many texts are done."""
    validation = round(size * VALIDATION_SHARE)
    done = 0
    for number, (name, count) in enumerate((("train.csv", size - validation), ("validation.csv", validation))):
        writer = Writer(random.Random(f"{seed}/{number}"))
        with (folder / name).open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("text", "label"))
            for start in range(0, count, _PIECE):
                piece = min(_PIECE, count - start)
                rows.writerows(writer.sample() for _ in range(piece))
                done += piece
                yield done


class Writer:
    """Writes one text after the other."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._bearing = {label: words.split() for label, words in _BEARING.items()}
        self._topics, self._fillers = _TOPICS.split(), _FILLERS.split()

    def sample(self) -> tuple[str, str]:
        """A text and its label."""
        rng = self.rng
        label = rng.choices(LABELS, _WEIGHTS)[0]
        # Most texts are a handful of words, a few are ten times as long: what length buckets are for.
        length = min(3 + int(rng.lognormvariate(2.0, 0.7)), 90)
        words = [rng.choice(self._topics if rng.random() < 0.25 else self._fillers) for _ in range(length)]
        for _ in range(rng.choice((1, 2, 2, 3))):
            self._insert(words, self._phrase(label))
        if rng.random() < 0.2:
            self._insert(words, [rng.choice(self._bearing[rng.choice(LABELS)])])
        text = " ".join(self._typed(word) for word in words)
        if rng.random() < 0.3:
            text += " " + rng.choice(_ENDINGS[rng.choice(LABELS) if rng.random() < 0.4 else label])
        return text, rng.choice(LABELS) if rng.random() < _WRONG_LABELS else label

    def _phrase(self, label: str) -> list[str]:
        rng = self.rng
        if label in _OPPOSITE and rng.random() < 0.15:
            return [rng.choice(_NEGATIONS), rng.choice(self._bearing[_OPPOSITE[label]])]
        word = rng.choice(self._bearing[label])
        return [rng.choice(_INTENSIFIERS), word] if rng.random() < 0.3 else [word]

    def _insert(self, words: list[str], phrase: list[str]) -> None:
        place = self.rng.randrange(len(words) + 1)
        words[place:place] = phrase

    def _typed(self, word: str) -> str:
        """The word as somebody types it on a phone."""
        rng = self.rng
        chance = rng.random()
        if word in _TEENCODE and chance < 0.5:
            return rng.choice(_TEENCODE[word])
        if chance < 0.08:
            word = without_accents(word)
        elif chance < 0.12:
            word += word[-1] * rng.randrange(1, 4)
        elif chance < 0.14 and len(word) > 3:
            place = rng.randrange(len(word) - 1)
            word = word[:place] + word[place + 1] + word[place] + word[place + 2 :]
        return word.replace("_", " ")


def without_accents(word: str) -> str:
    """``đẹp`` as ``dep``."""
    plain = unicodedata.normalize("NFD", word.replace("đ", "d").replace("Đ", "D"))
    return "".join(letter for letter in plain if not unicodedata.combining(letter))
