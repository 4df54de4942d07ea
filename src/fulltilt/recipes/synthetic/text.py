"""Vietnamese-like social text in three classes, with lengths as people write them.

    train.csv, validation.csv    columns text and label (negative, neutral, positive)

What a text means stands in a few label-bearing words among fillers, and one label in thirty is simply wrong, as in any
set that people have labelled.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator
from pathlib import Path

LABELS = ("negative", "neutral", "positive")
_WEIGHTS = (35, 20, 45)
VALIDATION_SHARE = 0.2
_WRONG_LABELS = 1 / 30

_VOCABULARY = {
    "filler": (
        "phim quán áo điện_thoại món bài_hát ca_sĩ trận đội shop giao_hàng nhân_viên phòng khách_sạn video game máy "
        "pin sách giày cà_phê trà_sữa bún phở xe trường thầy cô bạn admin clip nhạc mùi màu da tóc mình tôi bạn nó "
        "hôm_nay hôm_qua thì là mà và với cho của này kia rồi luôn nha nhé ạ vậy gì được biết nói xem mua đi về làm "
        "có một hai lần cũng vẫn đang sẽ người nhà đây đó thấy nghe trong ngoài trên nhưng vì nên lúc sau trước"
    ),
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
_WORDS = {use: text.split() for use, text in _VOCABULARY.items()}


def make(folder: Path, size: int, seed: int) -> Iterator[int]:
    """Write both files; yields once for each text."""
    validation = round(size * VALIDATION_SHARE)
    for number, (name, count) in enumerate((("train.csv", size - validation), ("validation.csv", validation))):
        rng = random.Random(f"{seed}/{number}")
        with (folder / name).open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("text", "label"))
            for text in range(count):
                rows.writerow(_sample(rng))
                yield text


def _sample(rng: random.Random) -> tuple[str, str]:
    """A text and its label."""
    label = rng.choices(LABELS, _WEIGHTS)[0]
    # Most texts are a handful of words, a few are ten times as long: what length buckets are for.
    words = rng.choices(_WORDS["filler"], k=min(3 + int(rng.lognormvariate(2.0, 0.7)), 90))
    for word in rng.choices(_WORDS[label], k=rng.choice((1, 2, 2, 3))):
        words.insert(rng.randrange(len(words) + 1), word)
    written = rng.choice(LABELS) if rng.random() < _WRONG_LABELS else label
    return " ".join(words).replace("_", " "), written
