"""Text for comparing log-probs: prose, arithmetic, code and a few other languages, so that many
tokens occur."""

SAMPLE_TEXT = '''\
The tide tables in the harbour office were still drawn by hand. Every spring the old pilot took a sheet of squared
paper, a ruler and the records of the year before, and began with the moon: where it would stand, how far from the
earth, how high above the water at noon. "The sea remembers for about six hours," he used to say, "and then it must be
told again." His daughter, who had studied in the capital, put the same numbers into a machine and had her answer
before he had sharpened his pencil. They compared the two on the first of May. They differed by four minutes at low
water, and the pilot, having looked out of the window, said that the machine was right, but that it had been lucky.

Question: A ferry leaves at 7:40 and needs 55 minutes for the 22 kilometres to the island. How fast does it go?
Answer: 55 minutes are 55/60 = 11/12 of an hour. The speed is 22 / (11/12) = 22 * 12 / 11 = 24 kilometres per hour. It
arrives at 8:35. If the current slows it by 2 km/h, it goes at 22 km/h and needs exactly one hour, until 8:40.

Let f(x) = x^3 - 3x + 1. Then f'(x) = 3x^2 - 3, which vanishes at x = 1 and x = -1. Since f(-1) = 3 and f(1) = -1, the
equation f(x) = 0 has three real roots, one below -1, one between -1 and 1, and one above 1. With x = 2 cos(t) the
identity 4 cos^3(t) - 3 cos(t) = cos(3t) gives 2 cos(3t) = -1, so t = 2*pi/9 is a solution: x = 2 cos(40 degrees).

def longest_run(values):
    """Length of the longest run of equal neighbours; 0 for an empty list."""
    best, current, previous = 0, 0, object()
    for value in values:
        current = current + 1 if value == previous else 1
        best, previous = max(best, current), value
    return best

assert longest_run([1, 1, 2, 2, 2, 3]) == 3 and longest_run([]) == 0

Am Morgen lag Schnee auf den Booten, und niemand fuhr hinaus. Le vent avait tourné pendant la nuit ; on entendait les
drisses battre contre les mâts. Los pescadores miraban el cielo sin decir nada, y en el café se hablaba de otra cosa.
港の時計は七時十分を指していた。 船は、まだ来ない。 Корабль пришёл только вечером, когда зажгли огни.

{"station": "harbour", "readings": [{"hour": 0, "level_m": 1.82}, {"hour": 6, "level_m": 4.07}], "valid": true}

In the end they kept both tables on the wall, hers printed and his drawn, and the sailors read whichever was nearer to
the door. When the office was closed, many years later, the last sheet was still there. Somebody had written under it,
in a third hand: "Checked against the sea, 14 October. It was the sea that was late."
'''
