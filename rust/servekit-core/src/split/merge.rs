//! Putting split batches together again.

use crate::split::write_head;
use crate::wire::msgpack::{write_array, write_bin_head, write_map, write_str, write_uint};
use crate::wire::{Cells, ColumnKind, Lists, ScannedBatch, Tensor, WireError};

/// Where a row of the merged batch comes from: part and row in it.
type Source = (usize, usize);

/// Merge batches of one kind. `positions[p][i]` is the place of row i of part p in the merged batch; together they are
/// the numbers from 0 on, each once. Merging what was split by row gives the batch that was split.
///
/// # Errors
/// No parts or kinds that differ, positions that are no permutation, or a column that one part has and another lacks.
pub fn merge(parts: &[ScannedBatch], positions: &[Vec<u32>]) -> Result<Vec<u8>, WireError> {
    let sources =
        sources(parts, positions).ok_or(WireError::Merge { column: "-", what: "positions are no permutation" })?;
    let Some(first) = parts.first() else {
        return Err(WireError::Merge { column: "-", what: "nothing to merge" });
    };
    if parts.iter().any(|part| part.kind() != first.kind()) {
        return Err(WireError::Merge { column: "-", what: "kinds differ" });
    }
    let columns = parts.iter().map(|part| part.cells().len()).max().unwrap_or(0);
    let mut out = Vec::with_capacity(parts.iter().map(|part| part.body().len()).sum());
    write_head(&mut out, first.tag(), columns);
    for (place, column) in first.columns().iter().enumerate().take(columns) {
        let cells: Vec<&Cells> = parts.iter().map(|part| part.cells().get(place).unwrap_or(&Cells::Absent)).collect();
        Merge { parts, sources: &sources, kind: column.kind, out: &mut out }
            .column(&cells)
            .map_err(|what| WireError::Merge { column: column.name, what })?;
    }
    Ok(out)
}

fn sources(parts: &[ScannedBatch], positions: &[Vec<u32>]) -> Option<Vec<Source>> {
    let rows: usize = parts.iter().map(ScannedBatch::rows).sum();
    let mut sources = vec![None; rows];
    if parts.len() != positions.len() {
        return None;
    }
    for (part, (batch, places)) in parts.iter().zip(positions).enumerate() {
        if batch.rows() != places.len() {
            return None;
        }
        for (row, place) in places.iter().enumerate() {
            let slot = sources.get_mut(*place as usize)?;
            if slot.replace((part, row)).is_some() {
                return None;
            }
        }
    }
    sources.into_iter().collect()
}

struct Merge<'a> {
    parts: &'a [ScannedBatch],
    sources: &'a [Source],
    kind: ColumnKind,
    out: &'a mut Vec<u8>,
}

impl Merge<'_> {
    fn column(&mut self, cells: &[&Cells]) -> Result<(), &'static str> {
        // A part without rows says nothing, unless all are such.
        let there: Vec<usize> = (0..cells.len()).filter(|part| self.parts[*part].rows() > 0).collect();
        let there = if there.is_empty() { (0..cells.len()).collect() } else { there };
        let absent = there.iter().filter(|part| matches!(cells[**part], Cells::Absent)).count();
        if absent == there.len() {
            self.out.push(0xc0);
            return Ok(());
        }
        if absent > 0 {
            return Err("one part has it, another lacks it");
        }
        match cells[there[0]] {
            Cells::Shared(range) => {
                let value = &self.parts[there[0]].body()[range.clone()];
                let same = there.iter().all(|part| match cells[*part] {
                    Cells::Shared(range) => &self.parts[*part].body()[range.clone()] == value,
                    _ => false,
                });
                self.out.extend_from_slice(value);
                if same { Ok(()) } else { Err("shared values differ") }
            }
            Cells::List(_) => {
                let mut lists = vec![None; cells.len()];
                for &part in &there {
                    match cells[part] {
                        Cells::List(list) => lists[part] = Some(*list),
                        _ => return Err("a list here, a tensor there"),
                    }
                }
                self.list(&lists)
            }
            Cells::Dict(_) => self.dict(cells),
            Cells::Stacked(tensor) => self.tensor(tensor, cells, &there),
            Cells::Absent => Ok(()),
        }
    }

    /// Rows that no part has are left out at the end and nil before that, where the kind allows it.
    fn list(&mut self, lists: &[Option<Lists>]) -> Result<(), &'static str> {
        let has = |(part, row): &Source| lists[*part].is_some_and(|list| *row < list.len);
        let kept = self.sources.iter().rposition(has).map_or(0, |last| last + 1);
        let gaps = !self.sources[..kept].iter().all(has);
        let may_gap = matches!(self.kind, ColumnKind::RaggedShort | ColumnKind::NestedShort | ColumnKind::DictOfLists);
        if (gaps || kept < self.sources.len() && kept > 0) && !may_gap {
            return Err("rows are missing");
        }
        write_array(self.out, kept);
        for source in &self.sources[..kept] {
            match lists[source.0].filter(|list| source.1 < list.len) {
                Some(list) => {
                    let part = &self.parts[source.0];
                    self.out.extend_from_slice(&part.body()[part.range(list, source.1)]);
                }
                None => self.out.push(0xc0),
            }
        }
        Ok(())
    }

    fn dict(&mut self, cells: &[&Cells]) -> Result<(), &'static str> {
        let mut keys: Vec<(&[u8], Vec<Option<Lists>>)> = Vec::new();
        for (part, cell) in cells.iter().enumerate() {
            let Cells::Dict(lists) = cell else { continue };
            for (key, list) in lists {
                let key = &self.parts[part].body()[key.clone()];
                let place = keys.iter().position(|(known, _)| *known == key).unwrap_or_else(|| {
                    keys.push((key, vec![None; cells.len()]));
                    keys.len() - 1
                });
                keys[place].1[part] = Some(*list);
            }
        }
        write_map(self.out, keys.len());
        for (key, lists) in keys {
            self.out.extend_from_slice(key);
            self.list(&lists)?;
        }
        Ok(())
    }

    fn tensor(&mut self, first: &Tensor, cells: &[&Cells], there: &[usize]) -> Result<(), &'static str> {
        let mut tensors = vec![None; cells.len()];
        let dtype = &self.parts[there[0]].body()[first.dtype.clone()];
        for &part in there {
            match cells[part] {
                Cells::Stacked(tensor)
                    if tensor.shape == first.shape && &self.parts[part].body()[tensor.dtype.clone()] == dtype =>
                {
                    tensors[part] = Some(tensor);
                }
                _ => return Err("tensors differ in type or shape"),
            }
        }
        write_map(self.out, 3);
        write_str(self.out, b"dtype");
        self.out.extend_from_slice(dtype);
        write_str(self.out, b"shape");
        write_array(self.out, first.shape.len() + 1);
        write_uint(self.out, self.sources.len() as u64);
        first.shape.iter().for_each(|n| write_uint(self.out, *n));
        write_str(self.out, b"data");
        let rows = self.sources.len();
        // Without rows, the stride is whatever the shape says.
        write_bin_head(self.out, if rows == 0 { 0 } else { first.stride * rows });
        for (part, row) in self.sources {
            let tensor = tensors[*part].ok_or("rows are missing")?;
            let start = tensor.data + tensor.stride * row;
            self.out.extend_from_slice(&self.parts[*part].body()[start..start + tensor.stride]);
        }
        Ok(())
    }
}
