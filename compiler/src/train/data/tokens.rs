//! Text as tokens.

use super::{Batch, Dataset, Epoch};
use crate::error::{Error, Result};
use gristmill_runtime::Tensor;

/// Windows of a sequence of tokens, for models of the next token: example `p` has `tokens` from `p` on, and `targets` from `p + 1` on, both
/// `i64[length]`. Windows overlap, unless they have a [stride](Tokens::with_stride).
#[derive(Clone, Debug)]
pub struct Tokens {
    tokens: Vec<i64>,
    length: usize,
    stride: usize,
}

impl Tokens {
    /// Windows of a length. Errors with `InvalidInput` when it is 0, or there are no more tokens than it.
    pub fn new(tokens: impl Into<Vec<i64>>, length: usize) -> Result<Tokens> {
        let tokens = tokens.into();
        if length == 0 || tokens.len() <= length {
            let n = tokens.len();
            let message = format!(
                "windows of {length} of {n} tokens: expected 1 to {}",
                n.saturating_sub(1)
            );
            return Err(Error::invalid(message));
        }
        Ok(Tokens {
            tokens,
            length,
            stride: 1,
        })
    }

    /// Windows that begin `stride` tokens apart: example `p` begins at `p * stride`. With the length as stride, an evaluation counts each target
    /// once. Tokens after the last whole window are left out.
    ///
    /// Errors with `InvalidInput` when the stride is 0.
    pub fn with_stride(self, stride: usize) -> Result<Tokens> {
        match stride {
            0 => Err(Error::invalid(
                "windows 0 tokens apart: expected at least 1",
            )),
            _ => Ok(Tokens { stride, ..self }),
        }
    }
}

impl Dataset for Tokens {
    fn len(&self) -> usize {
        (self.tokens.len() - self.length).div_ceil(self.stride)
    }

    fn rows(&self, places: &[usize], _: Epoch) -> Result<Batch> {
        super::check_places(places, self.len())?;
        let windows = |shift: usize| {
            let window =
                |&place: &usize| &self.tokens[place * self.stride + shift..][..self.length];
            let all: Vec<i64> = places.iter().flat_map(window).copied().collect();
            Tensor::from_slice(&all, &[places.len(), self.length])
        };
        Ok(vec![
            ("tokens".to_owned(), windows(0)?),
            ("targets".to_owned(), windows(1)?),
        ])
    }
}

/// The characters of a text, numbered in their order in Unicode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vocabulary {
    characters: Vec<char>,
}

impl Vocabulary {
    /// The characters of a text.
    pub fn of(text: &str) -> Vocabulary {
        let mut characters: Vec<char> = text.chars().collect();
        characters.sort_unstable();
        characters.dedup();
        Vocabulary { characters }
    }

    /// Number of characters.
    pub fn len(&self) -> usize {
        self.characters.len()
    }

    /// True without characters.
    pub fn is_empty(&self) -> bool {
        self.characters.is_empty()
    }

    /// The tokens of a text. Errors with `InvalidInput` at a character that is not in the vocabulary.
    pub fn encode(&self, text: &str) -> Result<Vec<i64>> {
        let token = |(at, c): (usize, char)| {
            let found = self.characters.binary_search(&c);
            found
                .map(|i| i as i64)
                .map_err(|_| Error::invalid(format!("{c:?} at byte {at} is not in the vocabulary")))
        };
        text.char_indices().map(token).collect()
    }

    /// The text of tokens. Errors with `InvalidInput` at one out of range.
    pub fn decode(&self, tokens: &[i64]) -> Result<String> {
        let character = |&token: &i64| {
            let found = usize::try_from(token)
                .ok()
                .and_then(|i| self.characters.get(i));
            let n = self.len();
            found.ok_or_else(|| Error::invalid(format!("token {token} of a vocabulary of {n}")))
        };
        tokens.iter().map(character).collect()
    }
}
