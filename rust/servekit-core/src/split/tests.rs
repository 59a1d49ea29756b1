use std::sync::Arc;

use proptest::prelude::*;
use rmpv::Value;

use super::*;
use crate::wire::Kind;

/// A body of `BatchStrOutput` with the given columns, as any msgpack library writes it.
fn body(rids: &[u64], columns: Vec<Value>) -> Vec<u8> {
    let rids = Value::Array(rids.iter().map(|rid| Value::from(*rid)).collect());
    let mut fields = vec![Value::from("BatchStrOutput"), rids];
    fields.extend(columns);
    let mut out = Vec::new();
    rmpv::encode::write_value(&mut out, &Value::Array(fields)).unwrap();
    out
}

fn scan(body: Vec<u8>) -> ScannedBatch {
    ScannedBatch::parse(Kind::BatchStr, Arc::new(body)).unwrap()
}

fn decode(body: &[u8]) -> Vec<Value> {
    match rmpv::decode::read_value(&mut &body[..]).unwrap() {
        Value::Array(fields) => fields,
        other => panic!("{other}"),
    }
}

fn values(rows: usize) -> impl Strategy<Value = Vec<Value>> {
    let value = prop_oneof![
        Just(Value::Nil),
        any::<u64>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        ".{0,40}".prop_map(Value::from),
        proptest::collection::vec(any::<u8>(), 0..300).prop_map(Value::Binary),
        any::<f64>().prop_map(Value::F64),
        proptest::collection::vec(any::<bool>().prop_map(Value::from), 0..20).prop_map(Value::Array),
    ];
    let alike = prop_oneof![
        Just(vec![Value::Nil; rows]),
        proptest::collection::vec((0..256_u32).prop_map(|n| Value::from(n + 256)), rows),
        (0..40_usize).prop_flat_map(move |size| {
            let bytes = proptest::collection::vec(any::<u8>(), size).prop_map(Value::Binary);
            proptest::collection::vec(bytes, rows)
        }),
        (0..40_usize).prop_flat_map(move |size| {
            let bytes = proptest::collection::vec(any::<u8>(), size);
            proptest::collection::vec(bytes.prop_map(|bytes| Value::Array(vec![Value::Binary(bytes)])), rows)
        }),
    ];
    prop_oneof![proptest::collection::vec(value, rows), alike]
}

proptest! {
    #[test]
    fn each_worker_gets_its_rows_in_order((workers, names, prompts) in proptest::collection::vec(0..6_u16, 1..40)
        .prop_flat_map(|workers| { let n = workers.len(); (Just(workers), values(n), values(n)) }))
    {
        let rids: Vec<u64> = workers.iter().enumerate().map(|(i, w)| Rid::mint(*w, 1, i as u64).0).collect();
        let whole = body(&rids, vec![Value::Array(names.clone()), Value::Nil, Value::Array(prompts.clone())]);
        let batch = scan(whole.clone());
        let parts = split_by_worker(&batch);
        prop_assert_eq!(parts.iter().map(|part| part.rows as usize).sum::<usize>(), rids.len());
        for part in &parts {
            let mine: Vec<usize> = (0..rids.len()).filter(|row| workers[*row] == part.route.worker).collect();
            let pick = |column: &[Value]| Value::Array(mine.iter().map(|row| column[*row].clone()).collect());
            let fields = decode((*part.body).as_ref());
            prop_assert_eq!(&fields[2..], &[pick(&names), Value::Nil, pick(&prompts)][..]);
        }
    }
}

#[test]
fn a_batch_of_one_worker_is_not_copied() {
    let rids = [Rid::mint(1, 1, 1).0, Rid::mint(1, 1, 2).0];
    let batch = scan(body(&rids, vec![]));
    let parts = split_by_worker(&batch);
    assert_eq!(parts.len(), 1);
    assert!(Arc::ptr_eq(&parts[0].body, batch.shared()));
}

#[test]
fn rows_are_taken_in_the_order_asked_for() {
    let batch = scan(body(&[10, 11, 12], vec![Value::Array(vec!["a".into(), "b".into(), "c".into()])]));
    let taken = decode(&take_rows(&batch, &[2, 0, 2]).unwrap());
    assert_eq!(taken[1], Value::Array(vec![12.into(), 10.into(), 12.into()]));
    assert_eq!(taken[2], Value::Array(vec!["c".into(), "a".into(), "c".into()]));
    assert_eq!(take_rows(&batch, &[3]), Err(WireError::Row { row: 3, rows: 3 }));
}

#[test]
fn rows_that_a_short_column_lacks_are_nil_before_others_and_left_out_at_the_end() {
    use crate::wire::columns::batch_str::OUTPUT_TOKEN_LOGPROBS_VAL as COLUMN;
    let mut columns = vec![Value::Nil; COLUMN - 1];
    columns.push(Value::Array(vec![Value::Binary(vec![1]), Value::Binary(vec![2])]));
    let batch = scan(body(&[10, 11, 12], columns));
    let take = |rows: &[u32]| decode(&take_rows(&batch, rows).unwrap())[COLUMN + 1].clone();
    assert_eq!(take(&[2, 1, 2]), Value::Array(vec![Value::Nil, Value::Binary(vec![2])]));
    assert_eq!(take(&[2]), Value::Array(vec![]));
    assert_eq!(take(&[1, 0]), Value::Array(vec![Value::Binary(vec![2]), Value::Binary(vec![1])]));
}
