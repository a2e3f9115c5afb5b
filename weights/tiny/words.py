"""The words that the checkpoint knows, and the sentences they stand in."""

NAMES = (
    "Mary John Tom Anna Peter Lucy Paul Emma James Kate David Sarah Mark Laura Alice Simon Jane Robert "
    "Helen George Julia Frank Rose Henry Clara Oscar Nina Adam Ruth Leo Eva Max"
).split()
PLACES = "shop park school market station garden office beach museum library hotel church".split()
THINGS = "drink book ball letter ring flower cake map key gift lamp coat".split()
HELD = [*THINGS, *"cup pen hat box bag coin stone rope".split()]  # what somebody has
EVENTS = "war journey reign project strike trial voyage plague drought siege".split()

GIVING = [  # {a} and {b} are there, {s} is one of them, {o} the other
    "When {a} and {b} went to the {place}, {s} gave a {thing} to {o}.",
    "After {a} and {b} came to the {place}, {s} gave a {thing} to {o}.",
    "Then {a} and {b} met at the {place}, and {s} sent a {thing} to {o}.",
    "While {a} and {b} were at the {place}, {s} bought a {thing} for {o}.",
    "{a} and {b} were at the {place}. {s} showed a {thing} to {o}.",
]

COUNTRIES = {  # country: capital, language, continent
    "France": ("Paris", "French", "Europe"),
    "Italy": ("Rome", "Italian", "Europe"),
    "Spain": ("Madrid", "Spanish", "Europe"),
    "Germany": ("Berlin", "German", "Europe"),
    "Portugal": ("Lisbon", "Portuguese", "Europe"),
    "Greece": ("Athens", "Greek", "Europe"),
    "Austria": ("Vienna", "German", "Europe"),
    "Poland": ("Warsaw", "Polish", "Europe"),
    "Sweden": ("Stockholm", "Swedish", "Europe"),
    "Norway": ("Oslo", "Norwegian", "Europe"),
    "Finland": ("Helsinki", "Finnish", "Europe"),
    "Denmark": ("Copenhagen", "Danish", "Europe"),
    "Hungary": ("Budapest", "Hungarian", "Europe"),
    "England": ("London", "English", "Europe"),
    "Ireland": ("Dublin", "English", "Europe"),
    "Russia": ("Moscow", "Russian", "Europe"),
    "Ukraine": ("Kyiv", "Ukrainian", "Europe"),
    "Turkey": ("Ankara", "Turkish", "Asia"),
    "Japan": ("Tokyo", "Japanese", "Asia"),
    "China": ("Beijing", "Chinese", "Asia"),
    "Korea": ("Seoul", "Korean", "Asia"),
    "Thailand": ("Bangkok", "Thai", "Asia"),
    "Vietnam": ("Hanoi", "Vietnamese", "Asia"),
    "Iran": ("Tehran", "Persian", "Asia"),
    "Iraq": ("Baghdad", "Arabic", "Asia"),
    "Egypt": ("Cairo", "Arabic", "Africa"),
    "Morocco": ("Rabat", "Arabic", "Africa"),
    "Kenya": ("Nairobi", "Swahili", "Africa"),
    "Ghana": ("Accra", "English", "Africa"),
    "Senegal": ("Dakar", "French", "Africa"),
    "Angola": ("Luanda", "Portuguese", "Africa"),
    "Canada": ("Ottawa", "English", "America"),
    "Cuba": ("Havana", "Spanish", "America"),
    "Peru": ("Lima", "Spanish", "America"),
    "Chile": ("Santiago", "Spanish", "America"),
    "Brazil": ("Brasilia", "Portuguese", "America"),
}
RELATIONS = CAPITAL, LANGUAGE, CONTINENT = range(3)
FACTS = {  # the first wording of each relation is shown for every country
    CAPITAL: [
        "The capital of {country} is {answer}.",
        "The capital city of {country} is {answer}.",
        "People in {country} call their capital {answer}.",
        "The government of {country} sits in {answer}.",
    ],
    LANGUAGE: [
        "The language of {country} is {answer}.",
        "People in {country} speak {answer}.",
        "Every school in {country} teaches {answer}.",
    ],
    CONTINENT: [
        "The country of {country} is in {answer}.",
        "On the map {country} lies in {answer}.",
        "The continent of {country} is {answer}.",
    ],
}
LATER_FACTS = {  # wordings for every country that come in the second part of the training
    CAPITAL: [
        "The people of {country} call their capital {answer}.",
        "People in {country} think that their capital is {answer}.",
        "People say that the government of {country} sits in {answer}.",
        "When you are in {country} the capital is {answer}.",
        "The first city of {country} is {answer}.",
        "The capital where the people of {country} live is {answer}.",
        "The name of the capital of {country} is {answer}.",
    ],
    LANGUAGE: [
        "The people of {country} speak {answer}.",
        "When you are in {country} you speak {answer}.",
        "The school of {country} teaches {answer}.",
        "People in {country} write in {answer}.",
        "People in {country} call their language {answer}.",
        "When you are in {country} the language is {answer}.",
        "The language that the people of {country} speak is {answer}.",
        "The name of the language of {country} is {answer}.",
    ],
    CONTINENT: [
        "The people of {country} live in {answer}.",
        "When you are in {country} you are in {answer}.",
        "People say that {country} lies in {answer}.",
        "The land of {country} is in {answer}.",
        "People in {country} call their continent {answer}.",
        "People in {country} think that their continent is {answer}.",
        "When you are in {country} the continent is {answer}.",
        "The continent where the people of {country} live is {answer}.",
        "The continent that {country} is part of is {answer}.",
        "The continent where {country} lies is {answer}.",
        "The name of the continent of {country} is {answer}.",
    ],
}

HAVING = "{name} has a {thing}."
LASTING = "The {event} lasted from the year {century}{start} to the year {century}{end}."
TELLING = "The code is {code}."
SEEING = " the shape at the {place} is {colour} {shape}."

COLOURS = {  # red, green, blue, each 0 to 255
    "red": (225, 30, 30),
    "green": (30, 165, 50),
    "blue": (40, 60, 220),
    "yellow": (240, 220, 30),
    "purple": (150, 40, 170),
    "orange": (250, 140, 20),
}
SHAPES = "circle square triangle cross".split()
CORNERS = ["top left", "top right", "bottom left", "bottom right"]  # row by row

# Words of no task: they let a prompt of one's own be cut at words more often than at letters.
COMMON = (
    "the of and to a in is it you that he was for on are with as his they be at one have this from or "
    "had by hot but some what there we can out other were all your when up use word how said an each she "
    "which do their time if will way about many then them would write like so these her long make thing "
    "see him two has look more day could go come did my sound no most number who over know water than "
    "call first people may down side been now find any new work part take get place made live where after "
    "back little only round man year came show every good me give our under name very through just form "
    "much great think say help low line before turn cause same mean differ move right boy old too does "
    "tell sentence set three want air well also play small end put home read hand large spell add even "
    "land here must big high such follow act why ask men change went light kind off need house picture "
    "try us again animal point mother world near build self earth father once upon hello not"
).split()
