//! Words of comments, README and guide: nouns of the field instead of "what", of clauses with "that",
//! and of sentences without a subject.

use super::assert_none;
use super::sources::{File, files, production, room};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// First words of a comment that names its thing by a question.
const OPENERS: &[&str] = &["What", "Whether", "How", "Which", "Those", "That"];

/// Ceilings of a room: "what" per 1,000 words of comments, and percent of comments that open with
/// one of [`OPENERS`]. They may only fall; a room without a row has [`GOAL`].
const CEILINGS: &[(&str, f64, f64)] = &[];
const GOAL: (f64, f64) = (2.0, 2.0);

/// Most "that" per 1,000 words of a page or of a source's comments.
const MAX_THAT: usize = 15;

/// Files with fewer words have a rate by chance.
const MIN_WORDS: usize = 150;

/// Ceilings of files above [`MAX_THAT`], a path and a rate per line. They may only fall.
const THAT_CEILINGS: &str = include_str!("that_ceilings.txt");

#[derive(Default)]
struct Comments {
    n: usize,
    n_opened: usize,
    n_words: usize,
    n_what: usize,
    n_that: usize,
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
            self.n_that += usize::from(word.eq_ignore_ascii_case("that"));
        }
    }

    fn what_per_1000(&self) -> f64 {
        1000.0 * self.n_what as f64 / self.n_words.max(1) as f64
    }

    /// Rounded up.
    fn that_per_1000(&self) -> usize {
        (1000 * self.n_that).div_ceil(self.n_words.max(1))
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

/// README and the pages of the guide, without blocks of code.
fn pages() -> impl Iterator<Item = File> {
    let is_markdown = |path: &PathBuf| path.extension().is_some_and(|e| e == "md");
    let is_page =
        |file: &File| file.path == "README.md" || file.path.starts_with("compiler/src/guide/");
    let markdown = files().into_iter().filter(is_markdown);
    let pages = markdown.filter_map(File::read).filter(is_page);
    pages.map(|mut file| {
        file.text = file.text.split("```").step_by(2).collect();
        file
    })
}

/// Rates of "that" by path, of the pages and sources with enough words.
fn rates_of_that() -> BTreeMap<String, usize> {
    let mut texts: Vec<(String, Vec<String>)> = pages().map(|f| (f.path, vec![f.text])).collect();
    texts.extend(production().map(|f| (f.path, comments(&f.text))));
    let mut rates = BTreeMap::new();
    for (path, texts) in texts {
        let mut counted = Comments::default();
        texts.iter().for_each(|text| counted.add(text));
        if counted.n_words >= MIN_WORDS {
            rates.insert(path, counted.that_per_1000());
        }
    }
    rates
}

/// The correction of a file, if its rate (`None`: too few words) and its row disagree.
fn correction(rate: Option<usize>, ceiling: Option<usize>) -> Option<String> {
    match (rate.filter(|&rate| rate > MAX_THAT), ceiling) {
        (Some(rate), None) => Some(format!("{rate} of 1,000 words, at most {MAX_THAT}: reword")),
        (Some(rate), Some(ceiling)) if rate > ceiling => {
            Some(format!("{rate} of 1,000 words, ceiling {ceiling}: reword"))
        }
        (Some(rate), Some(ceiling)) if rate + 2 < ceiling => {
            Some(format!("has improved: lower its ceiling to {rate}"))
        }
        (None, Some(_)) => Some("needs no ceiling any more: remove its row".into()),
        _ => None,
    }
}

#[test]
fn clauses_with_that_are_few() {
    let rates = rates_of_that();
    let mut ceilings: BTreeMap<&str, usize> = BTreeMap::new();
    for row in THAT_CEILINGS.lines() {
        let (path, ceiling) = row.split_once(' ').expect("a row is a path and a number");
        ceilings.insert(path, ceiling.parse().expect("a ceiling is a number"));
    }
    let mut paths: Vec<&str> = rates.keys().map(String::as_str).collect();
    paths.extend(ceilings.keys().filter(|path| !rates.contains_key(**path)));
    let correct = |path: &&str| {
        let found = correction(rates.get(*path).copied(), ceilings.get(path).copied());
        found.map(|text| format!("{path}: {text}"))
    };
    assert_none(
        "say the noun instead of a clause with \"that\" (ceilings: that_ceilings.txt)",
        paths.iter().filter_map(correct).collect(),
    );
}

#[test]
fn ceilings_of_that_only_fall() {
    let correct = |rate, ceiling| correction(rate, ceiling).unwrap_or_default();
    assert_eq!(correct(Some(15), None), "");
    assert_eq!(
        correct(Some(16), None),
        "16 of 1,000 words, at most 15: reword"
    );
    assert_eq!(
        correct(Some(21), Some(20)),
        "21 of 1,000 words, ceiling 20: reword"
    );
    assert_eq!(correct(Some(18), Some(20)), "");
    assert_eq!(
        correct(Some(17), Some(20)),
        "has improved: lower its ceiling to 17"
    );
    let removal = "needs no ceiling any more: remove its row";
    assert_eq!(correct(Some(15), Some(16)), removal);
    assert_eq!(correct(None, Some(16)), removal);
}

#[test]
fn pages_say_what_a_thing_is() {
    let has_phrase = |file: &File| {
        let words: Vec<&str> = file.text.split_whitespace().collect();
        format!("{} ", words.join(" ")).contains("is no ")
    };
    assert_none(
        "say what it is, instead of \"is no\"",
        pages().filter(has_phrase).map(|file| file.path).collect(),
    );
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
    assert_eq!(counted.that_per_1000(), 0);
}
