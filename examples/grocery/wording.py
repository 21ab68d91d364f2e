"""What the shop says to its customers: the shared instruction, the recommendation texts and Korean particles."""

from __future__ import annotations

from catalogue import Use

#: Opens every prompt, so that engines which cache prefixes compute it once.
INSTRUCTION = (
    "장보기 앱에서 두 상품을 함께 추천할지 정하는 일입니다. 두 상품이 한 요리나 한 쓰임에 같이 쓰이면 write와 추천 문구를, "
    "서로 어울리지 않으면 skip을 JSON으로 답하세요.\n"
)

_OPENINGS = (
    "{moment} {a:와과} {b:를을} 함께 쓰면 {benefit}.",
    "{a:를을} 고르셨다면 {b}도 담아 보세요. {moment} {benefit}.",
    "{a}에 {b:를을} 더해 보세요. {moment} {benefit}.",
    "{moment} 빼놓기 아쉬운 {b:가이} 있어요. {a:와과} 만나면 {benefit}.",
    "{moment} {a:와과} {b:는은} 좋은 짝이에요. {benefit}.",
)
_CLOSINGS = (
    "",
    "",
    " 지금 함께 담아 보세요.",
    " 오늘 장바구니에 나란히 담아요.",
)

#: Characters beyond which a text goes without a closing: texts stay within 50 tokens of Gemma's tokenizer.
_LONG = 48


class Noun(str):
    """A Korean noun that takes its particle by format specification: ``f"{Noun('우유'):를을}"`` is ``"우유를"``.

    The specification holds the form after a vowel, then the form after a final consonant. The noun must end in a Hangul syllable.
    """

    def __format__(self, particles: str) -> str:
        if not particles:
            return str(self)
        after_vowel, after_consonant = particles
        return self + (after_consonant if (ord(self[-1]) - 0xAC00) % 28 else after_vowel)


def prompt_text(first: str, second: str) -> str:
    """The prompt of one pair. It ends with a line break, which no tokenizer joins with the prefill."""
    return f"{INSTRUCTION}상품 1: {first}\n상품 2: {second}\n답:\n"


def recommendation(first: str, second: str, use: Use, chance: float) -> str:
    """A recommendation for the pair; ``chance`` in [0, 1) picks one wording of all that exist for ``use``."""
    wordings = [(o, c, b) for o in _OPENINGS for c in _CLOSINGS for b in use.benefits]
    opening, closing, benefit = wordings[int(chance * len(wordings))]
    text = opening.format(moment=use.moment, a=Noun(first), b=Noun(second), benefit=benefit)
    return text if len(text) > _LONG else text + closing
