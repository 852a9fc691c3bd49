//! Words of comments: nouns of the field instead of "what" and of sentences without a subject.

use super::assert_none;
use super::sources::{production, room};
use std::collections::BTreeMap;

/// First words of a comment that names its thing by a question.
const OPENERS: &[&str] = &["What", "Whether", "How", "Which", "Those", "That"];

/// Ceilings of a room: "what" per 1,000 words of comments, and percent of comments that open with
/// one of [`OPENERS`]. They may only fall; a room without a row has [`GOAL`].
const CEILINGS: &[(&str, f64, f64)] = &[];
const GOAL: (f64, f64) = (2.0, 2.0);

#[derive(Default)]
struct Comments {
    n: usize,
    n_opened: usize,
    n_words: usize,
    n_what: usize,
}

impl Comments {
    fn add(&mut self, comment: &str) {
        let is_letter = |c: char| c.is_ascii_alphabetic() || c == '\'';
        let words = comment.split(|c| !is_letter(c)).filter(|w| !w.is_empty());
        let first = comment.split(|c| !is_letter(c)).next().unwrap_or("");
        self.n += 1;
        self.n_opened += usize::from(OPENERS.contains(&first));
        for word in words {
            self.n_words += 1;
            self.n_what += usize::from(word.eq_ignore_ascii_case("what"));
        }
    }

    fn what_per_1000(&self) -> f64 {
        1000.0 * self.n_what as f64 / self.n_words.max(1) as f64
    }

    fn opened_percent(&self) -> f64 {
        100.0 * self.n_opened as f64 / self.n.max(1) as f64
    }
}

/// Comments of a source: adjoining lines are one.
fn comments(source: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut is_inside = false;
    for line in source.lines() {
        let Some(text) = line.trim_start().strip_prefix("//") else {
            is_inside = false;
            continue;
        };
        let text = text.trim_start_matches(['/', '!']).trim();
        match found.last_mut().filter(|_| is_inside) {
            Some(comment) => {
                comment.push(' ');
                comment.push_str(text);
            }
            None => found.push(text.into()),
        }
        is_inside = true;
    }
    found
}

#[test]
fn comments_use_nouns_of_the_field() {
    let mut rooms: BTreeMap<String, Comments> = BTreeMap::new();
    for file in production() {
        let counted = rooms.entry(room(&file.path)).or_default();
        for comment in comments(&file.text) {
            counted.add(&comment);
        }
    }
    let mut violations = Vec::new();
    for (room, counted) in &rooms {
        let row = CEILINGS.iter().find(|row| row.0 == room);
        let (what, opened) = row.map_or(GOAL, |row| (row.1, row.2));
        let found = (counted.what_per_1000(), counted.opened_percent());
        if found.0 > what || found.1 > opened {
            violations.push(format!(
                "{room}: \"what\" {:.1} of 1,000 words (ceiling {what}), {:.1} % of comments open with \
                 a question word (ceiling {opened})",
                found.0, found.1
            ));
        }
    }
    assert_none("name the thing a comment is about", violations);
}

#[test]
fn adjoining_lines_are_one_comment() {
    let source = "/// Whether it is.\n/// What else.\nfn f() {}\n// Fine, and what.\n";
    let found = comments(source);
    assert_eq!(found, ["Whether it is. What else.", "Fine, and what."]);
    let mut counted = Comments::default();
    found.iter().for_each(|c| counted.add(c));
    assert_eq!((counted.n, counted.n_opened), (2, 1));
    assert_eq!((counted.n_words, counted.n_what), (8, 2));
}
