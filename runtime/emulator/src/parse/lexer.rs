//! PTX text to tokens with line numbers.

use crate::fault::{Fault, FaultKind, Result};

/// A piece of PTX text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Token<'a> {
    /// Identifier, opcode, directive or number, dots and `::` included.
    Word(&'a str),
    /// Text between double quotes.
    Text(&'a str),
    /// One character of punctuation.
    Mark(char),
}

/// All tokens of `text` with the lines they stand on, counted from 1.
pub(crate) fn tokens(text: &str) -> Result<Vec<(Token<'_>, u32)>> {
    let mut lexer = Lexer {
        text,
        at: 0,
        line: 1,
    };
    let mut found = Vec::new();
    while let Some(token) = lexer.next()? {
        found.push(token);
    }
    Ok(found)
}

struct Lexer<'a> {
    text: &'a str,
    at: usize,
    line: u32,
}

impl<'a> Lexer<'a> {
    fn next(&mut self) -> Result<Option<(Token<'a>, u32)>> {
        self.skip_blank()?;
        let rest = &self.text[self.at..];
        let line = self.line;
        let Some(c) = rest.chars().next() else {
            return Ok(None);
        };
        if is_word(c) {
            let word = &rest[..word_length(rest)];
            self.at += word.len();
            return Ok(Some((Token::Word(word), line)));
        }
        if c == '"' {
            let Some(length) = rest[1..].find('"') else {
                return Err(Fault::at(FaultKind::Syntax, line, "a string without end"));
            };
            self.at += length + 2;
            return Ok(Some((Token::Text(&rest[1..=length]), line)));
        }
        self.at += c.len_utf8();
        Ok(Some((Token::Mark(c), line)))
    }

    /// Skips white space, comments and the NUL that ends NVRTC's buffer.
    fn skip_blank(&mut self) -> Result<()> {
        loop {
            let rest = &self.text[self.at..];
            if let Some(comment) = rest.strip_prefix("/*") {
                let Some(length) = comment.find("*/") else {
                    return Err(Fault::at(
                        FaultKind::Syntax,
                        self.line,
                        "a comment without end",
                    ));
                };
                self.line += comment[..length].matches('\n').count() as u32;
                self.at += length + 4;
            } else if rest.starts_with("//") {
                self.at += rest.find('\n').unwrap_or(rest.len());
            } else if let Some(c) = rest
                .chars()
                .next()
                .filter(|c| c.is_whitespace() || *c == '\0')
            {
                self.line += u32::from(c == '\n');
                self.at += c.len_utf8();
            } else {
                return Ok(());
            }
        }
    }
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || "_$%.".contains(c)
}

/// Bytes of the word at the start of `text`; `a::b` is one word, `L:` is not.
fn word_length(text: &str) -> usize {
    let bytes = text.as_bytes();
    let mut end = 0;
    loop {
        match bytes.get(end) {
            Some(c) if is_word(char::from(*c)) => end += 1,
            Some(b':') if bytes.get(end + 1) == Some(&b':') => end += 2,
            _ => return end,
        }
    }
}
