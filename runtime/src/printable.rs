//! Names from models in texts for people.

use std::borrow::Cow;

/// A name from a model, on one line: control characters, and those that change the direction of writing, are escaped.
pub fn printable(name: &str) -> Cow<'_, str> {
    if !name.contains(is_hidden) {
        return Cow::Borrowed(name);
    }
    let mut out = String::with_capacity(name.len() + 16);
    for c in name.chars() {
        if is_hidden(c) {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    Cow::Owned(out)
}

/// True for characters that move the text after them.
fn is_hidden(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_on_their_line() {
        assert_eq!(printable("/encoder/é"), "/encoder/é");
        assert_eq!(
            printable("x\n\u{1b}[2J\u{202e}y"),
            "x\\n\\u{1b}[2J\\u{202e}y"
        );
    }
}
