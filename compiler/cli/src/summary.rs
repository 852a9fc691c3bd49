//! Statistics of tensors for machines.

use gristmill::Tensor;
use gristmill_runtime::command::summary::Statistics;
use serde_json::{Value, json};

/// Statistics for machines. JSON has neither NaN nor infinities: they are `null`, and counted.
pub fn json(name: &str, t: &Tensor) -> Value {
    let s = Statistics::of(t);
    json!({
        "name": name,
        "dtype": t.dtype().name(),
        "shape": t.shape(),
        "min": s.min,
        "mean": s.mean,
        "max": s.max,
        "first": s.first,
        "nan": s.n_nan,
        "infinite": s.n_infinite,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_without_a_number_are_counted() {
        let t = Tensor::from_slice(&[f64::NAN, 1.0, f64::INFINITY, f64::NAN], &[4]).unwrap();
        let value = json("x", &t);
        assert_eq!((&value["nan"], &value["infinite"]), (&json!(2), &json!(1)));
        assert!(value["max"].is_null() && value["min"] == json!(1.0));
    }
}
