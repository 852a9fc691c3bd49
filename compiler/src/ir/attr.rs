//! Text forms of attribute values.

use super::constant::ConstData;
use super::dim::Dim;
use super::ops::Window;
use super::scalar::Real;
use gristmill_runtime::{DType, Tensor};
use std::fmt::Write;

/// A value that an op can carry, with a text form that parses back.
pub trait Attr: Clone {
    /// The text form.
    fn print(&self) -> String;
    /// Reads the text form.
    fn parse(text: &str) -> Option<Self>;
    /// The value with each dim replaced by what `f` gives for it.
    fn map_dims(&self, _: &dyn Fn(&Dim) -> Dim) -> Self {
        self.clone()
    }
}

macro_rules! attr_via_str {
    ($($ty:ty),*) => { $(
        impl Attr for $ty {
            fn print(&self) -> String { self.to_string() }
            fn parse(text: &str) -> Option<Self> { text.parse().ok() }
        }
    )* };
}
attr_via_str!(usize, i64, u64, bool);

impl Attr for Real {
    fn print(&self) -> String {
        self.to_string()
    }
    fn parse(text: &str) -> Option<Real> {
        text.parse().ok().map(Real)
    }
}

impl Attr for DType {
    fn print(&self) -> String {
        self.name().to_owned()
    }
    fn parse(text: &str) -> Option<DType> {
        DType::parse(text)
    }
}

impl Attr for String {
    fn print(&self) -> String {
        format!("{self:?}")
    }
    fn parse(text: &str) -> Option<String> {
        unquote(text)
    }
}

/// Undoes `{:?}` of a string.
pub fn unquote(text: &str) -> Option<String> {
    let inner = text.strip_prefix('"')?.strip_suffix('"')?;
    let mut out = String::new();
    let mut chars = inner.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        match chars.next()? {
            'n' => out.push('\n'),
            't' => out.push('\t'),
            'r' => out.push('\r'),
            '0' => out.push('\0'),
            'u' => {
                let hex: String = chars.by_ref().skip(1).take_while(|&c| c != '}').collect();
                out.push(char::from_u32(u32::from_str_radix(&hex, 16).ok()?)?);
            }
            c => out.push(c),
        }
    }
    Some(out)
}

impl<T: Attr> Attr for Option<T> {
    fn print(&self) -> String {
        self.as_ref().map_or("none".to_owned(), Attr::print)
    }
    fn parse(text: &str) -> Option<Option<T>> {
        match text {
            "none" => Some(None),
            text => T::parse(text).map(Some),
        }
    }
    fn map_dims(&self, f: &dyn Fn(&Dim) -> Dim) -> Option<T> {
        self.as_ref().map(|value| value.map_dims(f))
    }
}

impl<T: Attr> Attr for Vec<T> {
    fn print(&self) -> String {
        format!(
            "[{}]",
            self.iter().map(Attr::print).collect::<Vec<_>>().join(", ")
        )
    }
    fn parse(text: &str) -> Option<Vec<T>> {
        let inner = text.strip_prefix('[')?.strip_suffix(']')?;
        split_top(inner, ',')
            .into_iter()
            .map(|t| T::parse(t.trim()))
            .collect()
    }
    fn map_dims(&self, f: &dyn Fn(&Dim) -> Dim) -> Vec<T> {
        self.iter().map(|t| t.map_dims(f)).collect()
    }
}

impl Attr for Window {
    fn print(&self) -> String {
        format!(
            "({}, {}, {}, {})",
            self.strides.print(),
            self.dilations.print(),
            self.pads_low.print(),
            self.pads_high.print()
        )
    }
    fn parse(text: &str) -> Option<Window> {
        let inner = text.strip_prefix('(')?.strip_suffix(')')?;
        let parts: Vec<Vec<usize>> = split_top(inner, ',')
            .into_iter()
            .map(|t| Attr::parse(t.trim()))
            .collect::<Option<_>>()?;
        let [strides, dilations, pads_low, pads_high] = parts.try_into().ok()?;
        Some(Window {
            strides,
            dilations,
            pads_low,
            pads_high,
        })
    }
}

/// Splits at `sep` outside brackets and quotes; an empty text has no parts.
pub fn split_top(text: &str, sep: char) -> Vec<&str> {
    let (mut parts, mut depth, mut start, mut quoted, mut escaped) =
        (Vec::new(), 0i32, 0, false, false);
    for (i, c) in text.char_indices() {
        if quoted {
            quoted = escaped || c != '"';
            escaped = c == '\\' && !escaped;
            continue;
        }
        match c {
            '"' => quoted = true,
            '[' | '(' | '{' | '<' => depth += 1,
            ']' | ')' | '}' | '>' => depth -= 1,
            c if c == sep && depth == 0 => {
                parts.push(&text[start..i]);
                start = i + c.len_utf8();
            }
            _ => {}
        }
    }
    if !text[start..].trim().is_empty() || !parts.is_empty() {
        parts.push(&text[start..]);
    }
    parts
}

/// End of the quoted string that `text` begins with.
pub fn split_quoted(text: &str) -> Option<usize> {
    let mut escaped = false;
    for (i, c) in text.char_indices().skip(1) {
        if c == '"' && !escaped {
            return Some(i + 1);
        }
        escaped = c == '\\' && !escaped;
    }
    None
}

/// Constants of at most this many elements print as numbers, larger ones as hexadecimal bytes.
const NUMBERS_UP_TO: usize = 16;

impl Attr for ConstData {
    fn print(&self) -> String {
        let t = match self.tensor() {
            Ok(t) => t,
            Err(e) => return format!("unread {:?}", e.to_string()),
        };
        let shape = super::types::Shape::of(t.shape());
        if t.len() > NUMBERS_UP_TO {
            let mut text = format!("{}{shape} hex<", t.dtype());
            t.as_bytes()
                .iter()
                .for_each(|b| write!(text, "{b:02x}").expect("writing to a String"));
            text.push('>');
            return text;
        }
        let values: Vec<String> = gristmill_runtime::with_dtype!(t.dtype(), T => t.as_slice::<T>().iter().map(|v| format!("{v:?}")).collect());
        format!("{}{shape} <{}>", t.dtype(), values.join(", "))
    }

    fn parse(text: &str) -> Option<ConstData> {
        let open = text.find('<')?;
        let (ty, data) = text.split_at(open);
        let (ty, hex) = match ty.trim_end().strip_suffix("hex") {
            Some(ty) => (ty, true),
            None => (ty, false),
        };
        let data = data.strip_prefix('<')?.strip_suffix('>')?;
        let (dtype, shape) = ty.trim().split_at(ty.find('[')?);
        let dtype = DType::parse(dtype)?;
        let shape: Vec<usize> = Attr::parse(shape.trim())?;
        let bytes = if hex {
            parse_hex(data)?
        } else {
            parse_numbers(dtype, data)?
        };
        Tensor::from_bytes(dtype, &shape, &bytes)
            .ok()
            .map(ConstData::held)
    }
}

fn parse_hex(data: &str) -> Option<Vec<u8>> {
    let data = data.as_bytes();
    if !data.len().is_multiple_of(2) {
        return None;
    }
    let digit = |c: u8| (c as char).to_digit(16).map(|d| d as u8);
    data.chunks(2)
        .map(|p| Some(digit(p[0])? << 4 | digit(p[1])?))
        .collect()
}

fn parse_numbers(dtype: DType, data: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    for text in split_top(data, ',') {
        let text = text.trim();
        macro_rules! num {
            ($ty:ty) => {
                bytes.extend_from_slice(&text.parse::<$ty>().ok()?.to_le_bytes())
            };
        }
        match dtype {
            DType::F32 => num!(f32),
            DType::F64 => num!(f64),
            d if d.is_narrow_float() => {
                let value = Tensor::from_f64s(d, &[], &[text.parse().ok()?]).ok()?;
                bytes.extend_from_slice(value.as_bytes());
            }
            DType::I8 => num!(i8),
            DType::I16 => num!(i16),
            DType::I32 => num!(i32),
            DType::I64 => num!(i64),
            DType::U8 => num!(u8),
            DType::U16 => num!(u16),
            DType::U32 => num!(u32),
            DType::U64 => num!(u64),
            _ => bytes.push(text.parse::<bool>().ok()? as u8),
        }
    }
    Some(bytes)
}
