"""Prompts for the bundled model: three genres, eight or more each, from a few tokens to 300."""

from __future__ import annotations

PROSE = (
    "The sea",
    "Once the rain had stopped, the old clockmaker",
    "There is a simple reason why bread rises: the yeast",
    "In the spring of that year my grandmother decided that the orchard behind the house needed "
    "a wall, and so, without asking anyone, she",
    "A good library answers a question before it is asked. It does so by being arranged well, by "
    "being open when people are free, and by having somebody at the desk who has read a little "
    "of everything. The last of these",
    "The ferry left at six. On the upper deck two brothers were arguing about the price of a "
    "boat that neither of them could afford, while below them a woman slept with her head on a "
    "sack of onions. When the island came into view, the younger brother said that it looked "
    "smaller than he remembered. The older one answered that islands do not shrink, that only "
    "people grow, and that he for his part had stopped growing long ago. Nobody",
    "Most explanations of why the sky is blue begin with light and end with mathematics, but the "
    "heart of the matter can be told in a few sentences. Sunlight holds all colours. Air is made "
    "of parts much smaller than a wave of light, and such small parts scatter short waves far "
    "more than long ones. Blue waves are short, red waves are long; so the blue is sent in all "
    "directions and reaches us from every part of the sky, while the red goes straight on. In "
    "the evening, when the light has to cross more air before it comes to us, most of the blue "
    "has been lost on the way, and what is left is",
    "The letter arrived on a Tuesday, which was unusual, because nothing ever arrived on a "
    "Tuesday. Martha put it on the kitchen table and looked at it for a long time. The paper was "
    "thick and slightly yellow, the hand was one that she did not know, and the stamp showed a "
    "lighthouse. She made tea. She read the newspaper from the first page to "
    "the last. Only when it was nearly dark did she take a knife from the drawer, open the letter "
    "with a single careful cut, and begin. It was not long. It said that the house by the lake "
    "was hers now, that the roof was sound but the boat was not, and that there was one room, "
    "the small one at the end of the upper hall, which she must on no account open before the "
    "first of May. There was no name at the end of it. She read it again, then a third time, and",
)

CODE = (
    "import ",
    """\
def fib(n):
    """,
    """\
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
""",
    """\
def read_lines(path):
    with open(path, encoding='utf-8') as file:
        for line in file""",
    """\
for i in range(10):
    if i % 2 == 0:
        print(i)
    else:
        continue

while True:
    try:
        value = int(input('number: '))
    except ValueError:
""",
    """\
import argparse
import sys


def main(argv=None):
    parser = argparse.ArgumentParser(description='Counts words.')
    parser.add_argument('path', help='file to read')
    parser.add_argument('--top', type=int, default=10, help='how many to show')
    args = parser.parse_args(argv)
""",
    """\
class Matrix:
    def __init__(self, rows):
        self.rows = [list(row) for row in rows]
        if len({len(row) for row in self.rows}) > 1:
            raise ValueError('rows differ in length')

    def __getitem__(self, index):
        i, j = index
        return self.rows[i][j]

    def __setitem__(self, index, value):
        i, j = index
        self.rows[i][j] = value

    def transpose(self):
        return Matrix(zip(*self.rows))

    def __add__(self, other):
        if not isinstance(other, Matrix):
            return NotImplemented
""",
    """\
import unittest

from queue import Empty, Queue


class QueueTest(unittest.TestCase):
    def setUp(self):
        self.queue = Queue(maxsize=3)

    def test_empty(self):
        self.assertTrue(self.queue.empty())
        self.assertEqual(self.queue.qsize(), 0)
        with self.assertRaises(Empty):
            self.queue.get_nowait()

    def test_order(self):
        for value in range(3):
            self.queue.put(value)
        self.assertTrue(self.queue.full())
        self.assertEqual([self.queue.get() for _ in range(3)], [0, 1, 2])

    def test_task_done(self):
        self.queue.put('a')
        self.queue.get()
        self.queue.task_done()
        self.queue.join()

    def test_too_many_done(self):
        with self.assertRaises(ValueError):
            self.queue.task_done()

    def """,
)

STRUCTURED = (
    """\
# Notes

- """,
    '{"name": "',
    """\
GET /index.html HTTP/1.1
Host: """,
    '[{"id": 1, "name": "Ada", "on": true}, {"id": 2, "name": "Bob", "active": true}, {"id": 3,',
    """\
# Changelog

## 1.2.0

- Added a `--verbose` option.
- Fixed a crash with empty files.

## 1.1.0

- """,
    """\
2024-03-01 10:00:01 INFO  server: listening on port 8080
2024-03-01 10:00:04 INFO  server: connection from 10.0.0.7
2024-03-01 10:00:05 WARN  auth: unknown user 'guest'
2024-03-01 10:00:09 INFO  server: connection from 10.0.0.9
2024-03-01 10:00:""",
    """\
{
  "type": "function",
  "function": {
    "name": "get_weather",
    "description": "Current weather of a town",
    "parameters": {
      "type": "object",
      "properties": {
        "town": {"type": "string", "description": "name of the town"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}
      },
      "required": ["town"]
    }
  }
}
{
  "type": "function",
""",
    """\
| name | type | default | meaning |
| --- | --- | --- | --- |
| `path` | string | none | file to read |
| `limit` | integer | 100 | lines to show |
| `follow` | boolean | false | wait for more |
| `encoding` | string | utf-8 | of the file |

## Example

```json
{
  "path": "/var/log/messages",
  "limit": 20,
  "follow": true
}
```

## Errors

| code | meaning | what to do |
| --- | --- | --- |
| 1 | the file does not exist | check the path |
| 2 | the file cannot be read | check its permissions |
| 3 | the encoding is wrong | name the right one |
| 4 | the limit is not positive | choose another |

## See also

- [Tail](tail.md)
- [Head](head.md)
- """,
    """\
[project]
name = "example"
version = "0.1.0"
dependencies = [
  "numpy>=2.0",
  """,
)

GENRES = {"prose": PROSE, "code": CODE, "structured": STRUCTURED}
